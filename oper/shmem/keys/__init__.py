"""Dynamic tables: raw keys in the place of row numbers."""
