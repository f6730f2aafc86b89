"""Optimizers applied in the backward pass, and their arguments for the kernels."""
