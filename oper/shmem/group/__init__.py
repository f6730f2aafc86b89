"""Groups of ranks: members, memory domains, transport, and fault attribution."""
