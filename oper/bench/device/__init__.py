"""Kernels on one GPU, compared with those of torch and fbgemm."""
