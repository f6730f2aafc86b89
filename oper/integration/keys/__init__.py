"""Raw keys at the edge: rows by key, and TorchRec's maps of keys."""
