"""TorchRec and PyTorch edges: sharded modules, and their state."""
