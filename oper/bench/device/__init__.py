"""Benchmarks of OPER's kernels on one GPU, compared with those of torch and fbgemm."""
