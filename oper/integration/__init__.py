"""Adapters to TorchRec and PyTorch: sharded modules, and their state."""
