"""``oper calibrate``: measure the cost model's constants on this machine."""
