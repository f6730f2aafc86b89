"""Kernels on one GPU, beside those of torch and fbgemm."""
