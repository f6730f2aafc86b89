"""Off-policy evaluation: estimate a policy's value from the log of another policy."""
