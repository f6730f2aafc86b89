"""Memory that ranks share: heaps, arenas, segments, NUMA nodes, row formats."""
