"""Read raw logs of any supported format into rows."""
