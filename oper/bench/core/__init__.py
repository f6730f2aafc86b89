"""What all benchmarks share: records, processes, turns, workloads."""
