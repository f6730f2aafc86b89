"""Reading of raw logs: files, formats, fields and rows."""
