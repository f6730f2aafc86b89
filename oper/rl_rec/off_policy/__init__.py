"""The value of a policy from the log of another one."""
