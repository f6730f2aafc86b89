"""TorchRec and PyTorch edges: sharded modules, their state, and what DistributedDataParallel sees."""
