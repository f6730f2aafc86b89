"""OPER: fine-grained, statistics-driven placement of embedding tables.

The names below are loaded on first use, so that ``import oper`` stays fast and imports neither
torch nor torchrec nor a solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.lazy import lazy_exports

__version__ = "0.1.0"

_PUBLIC = {
    "shard": "oper.sharding",
    "migrate": "oper.sharding",
    "no_sync": "oper.sharding",
    "publish": "oper.inference",
    "attach": "oper.inference",
    "Publication": "oper.inference",
    "ServedModel": "oper.inference",
    "replan": "oper.replanning",
    "SavePlanner": "oper.integration.checkpoint",
    "LoadPlanner": "oper.integration.checkpoint",
    "CheckpointReader": "oper.integration.checkpoint_files",
    "rows_on_demand": "oper.integration.on_demand",
    "save_checkpoint": "oper.integration.saving",
    "load_checkpoint": "oper.integration.saving",
    "DeltaCheckpoints": "oper.integration.deltas",
    "make_plan": "oper.search",
    "verify_plan": "oper.search",
    "collect": "oper.analysis",
    "AccessStats": "oper.stats",
    "TableStats": "oper.stats",
    "Plan": "oper.plan",
    "Topology": "oper.topology",
    "TableSpec": "oper.tables",
    "SGD": "oper.shmem.optimizers",
    "RowWiseAdagrad": "oper.shmem.optimizers",
    "Adagrad": "oper.shmem.optimizers",
    "Adam": "oper.shmem.optimizers",
    "AdamW": "oper.shmem.optimizers",
    "PartialRowWiseAdam": "oper.shmem.optimizers",
    "LarsSGD": "oper.shmem.optimizers",
    "LAMB": "oper.shmem.optimizers",
    "PartialRowWiseLAMB": "oper.shmem.optimizers",
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
    from oper.integration.checkpoint import (
        LoadPlanner as LoadPlanner,
        SavePlanner as SavePlanner,
    )
    from oper.integration.checkpoint_files import CheckpointReader as CheckpointReader
    from oper.integration.deltas import DeltaCheckpoints as DeltaCheckpoints
    from oper.integration.on_demand import rows_on_demand as rows_on_demand
    from oper.integration.saving import (
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from oper.plan import Plan as Plan
    from oper.replanning import replan as replan
    from oper.search import make_plan as make_plan, verify_plan as verify_plan
    from oper.sharding import migrate as migrate, no_sync as no_sync, shard as shard
    from oper.shmem.optimizers import (
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

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
