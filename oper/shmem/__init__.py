"""From a plan to lookups: heap, directory, lookup, update. Knows nothing of analysis or search."""
