"""Recommender models: torch and torchrec modules that do not depend on OPER."""
