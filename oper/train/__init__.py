"""Training runs: configuration, model, training loop, validation, checkpoints."""
