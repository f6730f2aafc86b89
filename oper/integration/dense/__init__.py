"""The parts of a model between its sharded tables and its dense layers, and the training of the
dense layers."""
