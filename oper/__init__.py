"""OPER: fine-grained, statistics-driven placement of embedding tables.

The names below are loaded on first use, so that ``import oper`` stays fast and imports neither
torch nor torchrec nor a solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.support.lazy import lazy_exports

__version__ = "0.1.0"

_PUBLIC, __getattr__, __dir__ = lazy_exports(__name__, {
    "oper.sharding": ("shard", "migrate", "no_sync", "micro_batches"),
    "oper.pipeline": ("MicroBatchPipeline",),
    "oper.tracing": ("trace",),
    "oper.inference": ("publish", "attach", "Publication", "ServedModel"),
    "oper.replanning": ("replan", "Replanner", "row_stats"),
    "oper.integration.checkpoint.planners": ("SavePlanner", "LoadPlanner"),
    "oper.integration.checkpoint.files": ("CheckpointReader",),
    "oper.integration.checkpoint.on_demand": ("rows_on_demand",),
    "oper.integration.checkpoint.saving": ("save_checkpoint", "load_checkpoint",
                                                    "synchronize"),
    "oper.integration.checkpoint.deltas": ("DeltaCheckpoints",),
    "oper.search": ("make_plan", "verify_plan"),
    "oper.analysis": ("collect",),
    "oper.stats": ("AccessStats", "TableStats"),
    "oper.plan": ("Plan",),
    "oper.topology": ("Topology",),
    "oper.shmem.keys.directories": ("dynamic_rows",),
    "oper.shmem.keys.rules": ("DynamicTable",),
    "oper.integration.keys.keyed_rows": ("KeyedRows", "KeyMap"),
    "oper.tables": ("TableSpec",),
    "oper.shmem.optim.optimizers": (
        "SGD", "RowWiseAdagrad", "Adagrad", "Adam", "AdamW", "PartialRowWiseAdam", "LarsSGD",
        "LAMB", "PartialRowWiseLAMB"),
    "oper.errors": (
        "OperError", "InvalidInputError", "FileFormatError", "PlanError", "PlanInfeasibleError",
        "MissingDependencyError", "PeerLostError", "DeadlineError", "DesyncError"),
})

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from oper.analysis import collect as collect
    from oper.errors import (
        DeadlineError as DeadlineError,
        DesyncError as DesyncError,
        FileFormatError as FileFormatError,
        InvalidInputError as InvalidInputError,
        MissingDependencyError as MissingDependencyError,
        OperError as OperError,
        PeerLostError as PeerLostError,
        PlanError as PlanError,
        PlanInfeasibleError as PlanInfeasibleError,
    )
    from oper.inference import (
        Publication as Publication,
        ServedModel as ServedModel,
        attach as attach,
        publish as publish,
    )
    from oper.integration.checkpoint.deltas import DeltaCheckpoints as DeltaCheckpoints
    from oper.integration.checkpoint.files import CheckpointReader as CheckpointReader
    from oper.integration.checkpoint.on_demand import rows_on_demand as rows_on_demand
    from oper.integration.checkpoint.planners import (
        LoadPlanner as LoadPlanner,
        SavePlanner as SavePlanner,
    )
    from oper.integration.checkpoint.saving import (
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
        synchronize as synchronize,
    )
    from oper.integration.keys.keyed_rows import KeyedRows as KeyedRows, KeyMap as KeyMap
    from oper.pipeline import MicroBatchPipeline as MicroBatchPipeline
    from oper.plan import Plan as Plan
    from oper.replanning import (
        Replanner as Replanner,
        replan as replan,
        row_stats as row_stats,
    )
    from oper.search import make_plan as make_plan, verify_plan as verify_plan
    from oper.sharding import (
        micro_batches as micro_batches,
        migrate as migrate,
        no_sync as no_sync,
        shard as shard,
    )
    from oper.shmem.keys.directories import dynamic_rows as dynamic_rows
    from oper.shmem.keys.rules import DynamicTable as DynamicTable
    from oper.shmem.optim.optimizers import (
        LAMB as LAMB,
        SGD as SGD,
        Adagrad as Adagrad,
        Adam as Adam,
        AdamW as AdamW,
        LarsSGD as LarsSGD,
        PartialRowWiseAdam as PartialRowWiseAdam,
        PartialRowWiseLAMB as PartialRowWiseLAMB,
        RowWiseAdagrad as RowWiseAdagrad,
    )
    from oper.stats import AccessStats as AccessStats, TableStats as TableStats
    from oper.tables import TableSpec as TableSpec
    from oper.topology import Topology as Topology
    from oper.tracing import trace as trace
