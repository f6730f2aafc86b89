"""Read-only tables that processes of a host share: publisher and readers."""
