"""Recommender models: torch and torchrec modules, which train with or without `oper.shard`."""
