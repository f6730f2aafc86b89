"""The memory layout of the arenas, and its description for the kernels."""
