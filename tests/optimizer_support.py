"""Helpers of the optimizer tests: every optimizer written from its formula, and training with it.

The reference updates whole tables in plain torch, float32 or float64. It shares no code with the
runtime: dense autograd over the mean of the ranks' losses, the set of rows that any rank looked up,
and a few lines per optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from oper.plan import Plan
from oper.shmem.optim.optimizers import (
    LAMB,
    SGD,
    STATE_PARTS,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from oper.shmem.tables import ShardedTables
from tests.optimizer_formulas import Tensors, first_states, update_rows
from tests.runtime_support import (
    Batch,
    Case,
    initial_weights,
    rank_loss,
    reference_forward,
    run_ranks,
)

EVERY: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.3),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.05, eps=1e-8),
    "rowwise_adagrad_l2": RowWiseAdagrad(lr=0.05, eps=1e-8, weight_decay=0.2),
    "rowwise_adagrad_decoupled": RowWiseAdagrad(
        lr=0.05, eps=1e-8, weight_decay=0.5, decoupled=True),
    "adagrad": Adagrad(lr=0.05, eps=1e-3),
    "adam": Adam(lr=0.02),
    "adam_decay": Adam(lr=0.02, betas=(0.8, 0.99), weight_decay=0.3),
    "partial_rowwise_adam": PartialRowWiseAdam(lr=0.02),
    "partial_rowwise_adam_decay": PartialRowWiseAdam(
        lr=0.02, betas=(0.7, 0.95), eps=1e-6, weight_decay=0.3),
    "adamw": AdamW(lr=0.02, weight_decay=0.1),
    "sgd_decay": SGD(lr=0.3, weight_decay=0.2),
    "momentum_sgd": SGD(lr=0.1, momentum=0.8),
    "momentum_sgd_decay": SGD(lr=0.1, momentum=0.7, weight_decay=0.2),
    "rowwise_adagrad_begun": RowWiseAdagrad(lr=0.05, initial_accumulator_value=0.25),
    "adagrad_begun": Adagrad(lr=0.05, initial_accumulator_value=0.25),
    "lars_sgd": LarsSGD(lr=0.2, eta=0.1),
    "lars_sgd_decay": LarsSGD(lr=0.2, momentum=0.6, weight_decay=0.5, eta=0.2),
    "lamb": LAMB(lr=0.02),
    "lamb_decay": LAMB(lr=0.02, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3),
    "partial_rowwise_lamb": PartialRowWiseLAMB(lr=0.02),
    "partial_rowwise_lamb_decay": PartialRowWiseLAMB(
        lr=0.02, betas=(0.7, 0.95), eps=1e-6, weight_decay=0.3),
}


@dataclass
class Trained:
    """What a run leaves: outputs [step] of all ranks together, and parts by ``table/part``."""

    outputs: list[torch.Tensor]
    parts: Tensors


def looked_up(case: Case, batch: Batch) -> dict[str, torch.Tensor]:
    """Distinct ids of a batch by table."""
    per_key = batch.lengths.reshape(len(case.keys), batch.size).sum(1).tolist()
    ids = dict(zip(case.keys, torch.split(batch.ids.long(), per_key), strict=True))
    return {t.name: torch.cat([ids[f] for f in t.features]).unique() for t in case.tables}


def train_unsharded(case: Case, steps: Sequence[Sequence[Batch]],
                    optimizers: Mapping[str, Optimizer], rates: Sequence[float],
                    dtype: torch.dtype) -> Trained:
    """The reference. `rates`: factor on the learning rates at each step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    weights = {n: w.to(dtype, copy=True) for n, w in initial_weights(case).items()}
    states: dict[str, Tensors] = {}
    for t in case.tables:
        states[t.name] = first_states(optimizers[t.name], weights[t.name])
    outputs = []
    for number, (batches, rate) in enumerate(zip(steps, rates, strict=True), 1):
        leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
        outs = [reference_forward(case, leaves, b) for b in batches]
        losses = [rank_loss(o, b.target) for o, b in zip(outs, batches, strict=True)]
        (torch.stack(losses).sum() / len(losses)).backward()
        outputs.append(torch.cat([o.detach() for o in outs]))
        seen = [looked_up(case, b) for b in batches]
        for name, w in weights.items():
            rows = torch.cat([s[name] for s in seen]).unique()
            part = {k: s[rows] for k, s in states[name].items()}
            some = w[rows]
            optimizer = optimizers[name]
            update_rows(optimizer, some, part, leaves[name].grad[rows], optimizer.lr * rate, number)
            w[rows] = some
            for k, s in part.items():
                states[name][k][rows] = s
    torch.set_num_threads(threads)
    parts = {f"{n}/rows": w for n, w in weights.items()}
    parts |= {f"{n}/{k}": s for n, state in states.items() for k, s in state.items()}
    return Trained(outputs, parts)


def open_tables(case: Case, plan: Plan, group: Any, optimizers: Mapping[str, Optimizer]
                ) -> ShardedTables:
    """Sharded tables with one optimizer each, holding the case's initial weights."""
    tables = ShardedTables(plan, case.features, group, optimizers, 1.0 / group.world_size)
    for name, weight in initial_weights(case).items():
        tables.write(name, weight)
    tables.publish()
    return tables


def train_rank(case: Case, plan: Plan, steps: Sequence[Sequence[Batch]],
               optimizers: Mapping[str, Optimizer], rates: Sequence[float], group: Any) -> Trained:
    """One rank's part of a sharded run; `outputs` are this rank's."""
    tables = open_tables(case, plan, group, optimizers)
    first = [float(g["lr"]) for g in tables.param_groups]
    outputs = []
    for batches, rate in zip(steps, rates, strict=True):
        for param_group, lr in zip(tables.param_groups, first, strict=True):
            param_group["lr"] = lr * rate
        batch = batches[group.rank]
        out = tables.lookup(batch.lookup(case))
        rank_loss(out, batch.target).backward()
        outputs.append(out.detach().clone())
    tables.barrier()
    parts = {f"{t.name}/{part}": tables.read(t.name, part=part) for t in case.tables
             for part in ("rows", *(p for p, _ in STATE_PARTS[t.optimizer]))}
    tables.barrier()
    tables.close()
    return Trained(outputs, parts)


def train_sharded(case: Case, plan: Plan, steps: Sequence[Sequence[Batch]],
                  optimizers: Mapping[str, Optimizer], rates: Sequence[float]) -> Trained:
    """Train on virtual ranks; all must end with the same tables."""
    ranks = run_ranks(plan.world_size,
                      lambda g: train_rank(case, plan, steps, optimizers, rates, g))
    for other in ranks[1:]:
        for name, value in ranks[0].parts.items():
            assert torch.equal(value, other.parts[name]), f"two ranks read another {name}"
    return replace(ranks[0], outputs=[
        torch.cat([r.outputs[k] for r in ranks]) for k in range(len(steps))])


def with_optimizers(case: Case, optimizers: Mapping[str, Optimizer]) -> Case:
    """The case with every table's optimizer named as the plan must name it."""
    return replace(case, tables=tuple(
        replace(t, optimizer=optimizers[t.name].name) for t in case.tables))


def assert_close(got: Trained, want: Trained, tolerance: float = 1e-5) -> None:
    """Every output and part within `tolerance` of its largest value."""
    pairs = [(f"output of step {k}", a, b)
             for k, (a, b) in enumerate(zip(got.outputs, want.outputs, strict=True))]
    assert got.parts.keys() == want.parts.keys()
    pairs += [(n, a, want.parts[n]) for n, a in got.parts.items()]
    for name, a, b in pairs:
        assert a.shape == b.shape, f"{name}: {tuple(a.shape)} for {tuple(b.shape)}"
        if b.numel():
            gap, largest = (a.double() - b.double()).abs().max(), b.abs().max()
            assert gap <= tolerance * largest, f"{name}: {gap} from the reference, max {largest}"
