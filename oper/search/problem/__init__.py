"""What is planned: tables with their access curves, machine, constraints, space of placements."""
