"""Raw logs in whatever form they come: files, formats, fields, rows."""
