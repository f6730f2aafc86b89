"""Vocabularies, which map raw values to ids."""
