"""The relaxation: resource rows, their consumption by configurations, pushed pieces."""
