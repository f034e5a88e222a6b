"""RSPO inside other trainers: a package for each, which needs the library it is named after."""
