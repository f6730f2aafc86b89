"""Recommender models: torch and torchrec modules that know nothing of OPER."""
