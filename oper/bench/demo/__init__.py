"""One log through all stages, beside TorchRec and the unsharded model."""
