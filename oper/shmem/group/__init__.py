"""Who takes part: ranks, memory domains, transport, and who is behind."""
