"""Pages with plots, each one file, from plans, statistics and benchmark records."""
