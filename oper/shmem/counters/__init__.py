"""What tables tell of their work: traffic, phases, changed rows, progress."""
