"""The planning problem: tables with access curves, machine, constraints, plan space."""
