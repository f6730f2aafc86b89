"""Imported last by the fork server. What it has imported is no garbage in its children, whose
collections would copy the memory of all these objects: half of the time of most ranks."""

import gc

gc.collect()
gc.freeze()
