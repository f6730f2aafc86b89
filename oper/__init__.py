"""OPER: fine-grained, statistics-driven placement of embedding tables.

The names below are loaded on first use, so that ``import oper`` stays fast and imports neither
torch nor torchrec nor a solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.support.lazy import lazy_exports

__version__ = "0.1.0"

_PUBLIC = {
    "shard": "oper.sharding",
    "migrate": "oper.sharding",
    "no_sync": "oper.sharding",
    "micro_batches": "oper.sharding",
    "MicroBatchPipeline": "oper.pipeline",
    "trace": "oper.tracing",
    "publish": "oper.inference",
    "attach": "oper.inference",
    "Publication": "oper.inference",
    "ServedModel": "oper.inference",
    "replan": "oper.replanning",
    "Replanner": "oper.replanning",
    "SavePlanner": "oper.integration.checkpoint.planners",
    "LoadPlanner": "oper.integration.checkpoint.planners",
    "CheckpointReader": "oper.integration.checkpoint.files",
    "rows_on_demand": "oper.integration.checkpoint.on_demand",
    "save_checkpoint": "oper.integration.checkpoint.saving",
    "load_checkpoint": "oper.integration.checkpoint.saving",
    "DeltaCheckpoints": "oper.integration.checkpoint.deltas",
    "make_plan": "oper.search",
    "verify_plan": "oper.search",
    "collect": "oper.analysis",
    "AccessStats": "oper.stats",
    "TableStats": "oper.stats",
    "Plan": "oper.plan",
    "Topology": "oper.topology",
    "DynamicTable": "oper.shmem.keys.rules",
    "KeyedRows": "oper.integration.keys.keyed_rows",
    "KeyMap": "oper.integration.keys.keyed_rows",
    "TableSpec": "oper.tables",
    "SGD": "oper.shmem.optim.optimizers",
    "RowWiseAdagrad": "oper.shmem.optim.optimizers",
    "Adagrad": "oper.shmem.optim.optimizers",
    "Adam": "oper.shmem.optim.optimizers",
    "AdamW": "oper.shmem.optim.optimizers",
    "PartialRowWiseAdam": "oper.shmem.optim.optimizers",
    "LarsSGD": "oper.shmem.optim.optimizers",
    "LAMB": "oper.shmem.optim.optimizers",
    "PartialRowWiseLAMB": "oper.shmem.optim.optimizers",
    "OperError": "oper.errors",
    "InvalidInputError": "oper.errors",
    "FileFormatError": "oper.errors",
    "PlanError": "oper.errors",
    "PlanInfeasibleError": "oper.errors",
    "MissingDependencyError": "oper.errors",
    "PeerLostError": "oper.errors",
    "DeadlineError": "oper.errors",
    "DesyncError": "oper.errors",
}

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
    )
    from oper.integration.keys.keyed_rows import KeyedRows as KeyedRows, KeyMap as KeyMap
    from oper.pipeline import MicroBatchPipeline as MicroBatchPipeline
    from oper.plan import Plan as Plan
    from oper.replanning import Replanner as Replanner, replan as replan
    from oper.search import make_plan as make_plan, verify_plan as verify_plan
    from oper.sharding import (
        micro_batches as micro_batches,
        migrate as migrate,
        no_sync as no_sync,
        shard as shard,
    )
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

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
