"""Utilities for all packages: validated files, folder locks, environment variables, command-line
flags, lazy imports, and compiled counting."""
