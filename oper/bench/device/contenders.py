"""Contenders of the GPU benchmarks: OPER, torch, fbgemm; and the float64 reference with which
they are compared before timing."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oper.bench.device.cases import DeviceCase, Inputs
from oper.bench.tables.sides import OPTIMIZER
from oper.bench.tables.unsharded import EPS, LEARNING_RATE, fbgemm_bags
from oper.bench.tables.verify import Verdict
from oper.errors import InvalidInputError
from oper.plan import Plan
from oper.shmem.group.groups import Group, SingleGroup
from oper.support.environment import setting
from oper.train.reference import SparseTableOptimizer

FBGEMM_ENV = "OPER_FBGEMM"  # folder with modules of fbgemm_gpu; see benchmarks/gpu.py


def initial_rows(case: DeviceCase, table: int, device: torch.device) -> torch.Tensor:
    """Initial rows [R, D] of a table, equal for every contender, with the case's dtype."""
    generator = torch.Generator(device=device).manual_seed(case.work.seed + table)
    dtype = getattr(torch, case.dtype)
    rows = torch.empty(case.work.num_rows[table], case.work.dim, device=device, dtype=torch.float32)
    return rows.uniform_(-0.05, 0.05, generator=generator).to(dtype)


def open_tables(case: DeviceCase, device: torch.device, plan: Plan, group: Group | None = None,
                trained: bool = True) -> Any:
    """Open `DeviceTables` and write the initial rows; read-only unless `trained`."""
    from oper.shmem.device.tables import DeviceTables

    features = [(f"f{k}", t.name) for k, t in enumerate(case.tables())]
    tables = DeviceTables(plan, features, group or SingleGroup(), OPTIMIZER if trained else None,
                          device=device)
    for k, spec in enumerate(case.tables()):
        tables.write(spec.name, initial_rows(case, k, device))
    tables.flush_replicas()
    return tables


@dataclass(frozen=True, slots=True)
class Side:
    """A contender.

    Attributes:
        forward: function from a batch to its pooled rows [B, T * D]; their backward pass updates
            the tables.
        rows: function from a table's index and ids [n] to rows [n, D], for comparison; None for a
            contender without updates.
        tolerance: allowed absolute error of pooled rows, relative to the largest one.
    """

    forward: Callable[[Inputs], torch.Tensor]
    rows: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    tolerance: float = 1e-5

    def lookup(self, inputs: Inputs) -> torch.Tensor:
        """Pooled rows [B, T * D] of a batch, without gradient."""
        with torch.no_grad():
            return self.forward(inputs)


def oper_side(tables: Any, specs: Sequence[Any]) -> Side:
    """OPER's contender; `tables` are `DeviceTables`, `specs` their `TableSpec`s."""
    def rows(table: int, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = torch.empty(ids.numel(), specs[table].dim,
                                dtype=tables.dtype(specs[table].name))
            tables.gather(specs[table].name, ids.cpu().numpy(), "rows",
                          slice(0, specs[table].dim), found)
        return found

    return Side(lambda x: tables.lookup(x.lookup), rows)


def torch_side(case: DeviceCase, device: torch.device) -> Side:
    """torch's `embedding_bag` on the concatenated tables, one launch per batch; lookups only."""
    joint = torch.cat([initial_rows(case, k, device) for k in range(len(case.work.num_rows))])
    starts = [0]
    for n in case.work.num_rows:
        starts.append(starts[-1] + n)
    shifts = torch.tensor(starts[:-1], device=device)

    def forward(x: Inputs) -> torch.Tensor:
        per_table = x.lookup.ids.numel() // len(case.work.num_rows)
        ids = x.lookup.ids + shifts.repeat_interleave(per_table)
        out = torch.nn.functional.embedding_bag(ids, joint, x.offsets[:-1], mode="sum")
        # The other contenders' layout: one row per sample.
        blocks = out.view(len(case.work.num_rows), case.work.batch_size, case.work.dim)
        return blocks.transpose(0, 1).reshape(case.work.batch_size, -1).float()

    # torch's outputs have the dtype of the rows.
    return Side(forward, tolerance=1e-5 if case.dtype == "float32" else 4e-3)


@functools.cache
def has_fbgemm() -> bool:
    """Whether fbgemm_gpu can be imported, from the folder in `FBGEMM_ENV` if that is set.

    Raises:
        InvalidInputError: `FBGEMM_ENV` is set, but the import fails.
    """
    folder = setting(FBGEMM_ENV, "cannot compare with fbgemm")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        if folder:
            raise InvalidInputError("cannot compare with fbgemm", FBGEMM_ENV, folder,
                                    f"a package that loads ({str(error).splitlines()[0]})",
                                    "install a build for this torch, or unset the variable"
                                    ) from error
        return False
    return True


def fbgemm_side(case: DeviceCase, device: torch.device, location: str = "DEVICE") -> Side:
    """Open fbgemm's tables for the comparison, with rows in `location`; see `fbgemm_bags`."""
    fused = fbgemm_bags(case.work.num_rows, case.work.dim,
                        lambda k: initial_rows(case, k, device), device, location, case.dtype)

    def rows(table: int, ids: torch.Tensor) -> torch.Tensor:
        if location == "MANAGED_CACHING":
            fused.flush()
        weight = fused.split_embedding_weights()[table]
        found: torch.Tensor = weight[ids.to(weight.device)].detach().cpu()
        return found

    return Side(lambda x: fused(x.lookup.ids, x.offsets), rows)


# ---- the reference -------------------------------------------------------------------------------

# max|a - b| <= tolerance * max|b|: float16 rows may round to either neighbour in every step.
ROWS_TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
_SAMPLES = 64


class Reference:
    """Pooled rows, and rows after steps of row-wise Adagrad (`SparseTableOptimizer`, FBGEMM's
    EXACT_ROWWISE_ADAGRAD), in float64.

    Args:
        case: the case.
        device: the device that computes the reference.
        steps: batches to train on, in order.
        gradient: output gradient of every step, float32 [B, T * D].
    """

    def __init__(self, case: DeviceCase, device: torch.device, steps: Sequence[Inputs],
                 gradient: torch.Tensor) -> None:
        self._case = case
        self.samples = torch.arange(0, case.work.batch_size,
                                    max(1, case.work.batch_size // _SAMPLES), device=device)
        self.pooled: list[torch.Tensor] = []  # [samples, D] by table, of the first step's batch
        self.ids: list[torch.Tensor] = []  # touched, by table
        self.rows: list[torch.Tensor] = []
        for table in range(len(case.work.num_rows)):
            weight = initial_rows(case, table, device)
            bags = steps[0].by_table[table].view(-1, case.work.pooling)[self.samples]
            self.pooled.append(weight[bags].double().sum(1))
            of_table = gradient[:, table * case.work.dim:(table + 1) * case.work.dim]
            touched = torch.unique(torch.cat([x.by_table[table] for x in steps]))
            bag = torch.nn.EmbeddingBag.from_pretrained(weight[touched].double(), freeze=False,
                                                        mode="sum")
            optimizer = SparseTableOptimizer(bag, "rowwise_adagrad", LEARNING_RATE, EPS)
            for x in steps:
                optimizer.zero_grad()
                at = torch.searchsorted(touched, x.by_table[table])
                bag(at.view(-1, case.work.pooling)).backward(of_table.double())
                optimizer.step()
            self.ids.append(touched)
            self.rows.append(bag.weight.detach())

    def check_lookup(self, side: Side, first: Inputs) -> dict[str, Any]:
        """Compare a contender's pooled rows of the first batch, before it trains; returns
        `Verdict.to_json`."""
        verdict = Verdict({"pooled": side.tolerance})
        verdict.compare("pooled", side.lookup(first)[self.samples].double(),
                        torch.cat(self.pooled, 1))
        return verdict.to_json()

    def check_rows(self, side: Side) -> dict[str, Any]:
        """Compare the rows that the steps touched, after a contender has trained; returns
        `Verdict.to_json`."""
        assert side.rows is not None
        verdict = Verdict({"rows": ROWS_TOLERANCE[self._case.dtype]})
        for table, ids in enumerate(self.ids):
            verdict.compare("rows", side.rows(table, ids).double(), self.rows[table].cpu())
        return verdict.to_json()
