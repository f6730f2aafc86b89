"""What is between a model's sharded tables and its dense layers, and how these are trained."""
