"""Optimizers that are applied in the backward pass, and what the kernels are told of them."""
