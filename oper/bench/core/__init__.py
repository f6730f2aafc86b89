"""Code shared by all benchmarks: records, processes, interleaved timing, workloads."""
