"""From a plan to lookups: heap, directory, lookup, update. Uses neither analysis nor search."""
