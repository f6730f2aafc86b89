"""A simulated shop, policies for it, and logs of their visits."""
