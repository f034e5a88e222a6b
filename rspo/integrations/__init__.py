"""RSPO inside other trainers, one package each."""
