"""A simulated shop, policies and logs of its visits."""
