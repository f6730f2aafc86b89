"""The certificate of a plan: what it carries, and checking it without the code that made it."""
