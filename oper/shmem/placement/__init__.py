"""Where rows lie: layout of the arenas and the arrays that the kernels are given."""
