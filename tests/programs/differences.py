"""What changes after sharding: the differences from the unsharded model that the oracle allows.

The same list, with the reasons, is docs/what-changes.md; a test compares numbers and headings.
"""

from __future__ import annotations

SNAPSHOTS = 1

# Number: heading.
DIFFERENCES: dict[int, str] = {
    SNAPSHOTS: "`state_dict()` values are snapshots",
}
