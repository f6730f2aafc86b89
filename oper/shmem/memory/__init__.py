"""Memory that ranks share: heaps, arenas, segments, NUMA nodes, formats of rows."""
