"""Read-only tables that the processes of a host share: publisher and readers."""
