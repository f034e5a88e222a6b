"""RSPO inside other trainers; each module needs the library it is named after."""
