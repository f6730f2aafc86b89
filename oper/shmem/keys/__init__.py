"""Dynamic tables: raw keys instead of row numbers."""
