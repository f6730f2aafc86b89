"""The differences from the unsharded model that the oracle allows.

docs/reference/what-changes.md has the same list with reasons; a test compares numbers and headings.
An action that meets a difference names it in its `Action`.
"""

NO_GRAD, SNAPSHOTS, NO_STORAGE, NOT_REPLACED, DTYPE, NO_PICKLE = range(1, 7)
COLLECTIVE, BATCH, MODULES, FROZEN_TOGETHER, ENDS, THREADS, NO_RESHARD = range(7, 14)

# Number: heading.
DIFFERENCES: dict[int, str] = {
    NO_GRAD: "Tables have no `.grad`",
    SNAPSHOTS: "`state_dict()` values are snapshots",
    NO_STORAGE: "`weight` has no storage of its own",
    NOT_REPLACED: "`weight` cannot be replaced",
    DTYPE: "Tables keep their dtype and device",
    NO_PICKLE: "No pickling, no TorchScript",
    COLLECTIVE: "What is collective",
    BATCH: "A batch must not change before its backward pass",
    MODULES: "Which modules are replaced",
    FROZEN_TOGETHER: "Frozen tables and accumulated gradients",
    ENDS: "A batch that one rank refuses",
    THREADS: "Threads",
    NO_RESHARD: "`DistributedModelParallel.reshard`",
}
