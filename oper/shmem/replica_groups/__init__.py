"""Groups of ranks that each hold all tables, and their synchronization."""
