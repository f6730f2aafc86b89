"""Optimizers of sharded tables: those of tags, and as TorchRec's ``fused_optimizer``."""
