"""The certificate of a plan, and its check by code independent of the search."""
