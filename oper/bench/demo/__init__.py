"""One log through all stages, compared with TorchRec and the unsharded model."""
