"""The relaxed problem: resource rows, what configurations consume of them, pushed pieces."""
