"""Imported last by the fork server: excludes all objects so far from garbage collections.

Otherwise, a collection in a forked child would write to these objects, so that their memory is
copied, which takes half of the time of most ranks.
"""

import gc

gc.collect()
gc.freeze()
