"""Preprocess raw logs into Parquet folders with vocabularies."""
