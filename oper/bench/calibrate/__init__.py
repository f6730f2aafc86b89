"""The constants of the cost model, measured on this machine."""
