"""The relaxed problem: resource rows, what configurations ask of them, pushed pieces."""
