"""Replica groups on virtual ranks, and a simulation of the groups in plain torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from oper.plan import Plan, uniform_plan
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.optim.optimizers import STATE_PARTS, Optimizer
from oper.shmem.replica_groups.groups import Background, ReplicaGroups
from oper.shmem.replica_groups.synchronizer import Synchronizer
from oper.shmem.tables import ShardedTables
from tests import random_plans as rp, runtime_support as rs
from tests.references import first_states

Body = Callable[[ShardedTables, int], Any]


def run_in_groups(body: Callable[[ReplicaGroups], Any], size: int, every: int, count: int = 2,
                  delay: int = 0, bits: int = 32, domains: Sequence[int] | None = None
                  ) -> list[Any]:
    """Run `body` on `count` groups of `size` virtual ranks; return results by global rank."""
    mine = [ThreadGroup.create(size, 30.0, domains) for _ in range(count)]
    across, behind = ([ThreadGroup.create(count, 30.0) for _ in range(size)] for _ in range(2))

    def on_rank(whole: ThreadGroup) -> Any:
        number, rank = divmod(whole.rank, size)
        return body(ReplicaGroups(whole, mine[number][rank], across[rank][number], every, delay,
                                  Background(behind[rank][number]) if delay else None, bits))

    return rs.run_ranks(size * count, on_rank)


def open_in_group(groups: ReplicaGroups, plan: Plan, features: Sequence[tuple[str, str]],
                  optimizer: Optimizer, weights: Mapping[str, torch.Tensor]) -> ShardedTables:
    """Open tables with these rows, whose gradients are the mean over all ranks. Collective."""
    tables = ShardedTables(plan, features, groups.mine, optimizer,
                           groups.gradient_scale(1.0 / groups.whole.world_size))
    Synchronizer(tables, groups)
    for name, weight in weights.items():
        tables.write(name, weight)
    tables.flush_replicas()
    return tables


def run_groups(case: rs.Case, plan: Plan, optimizer: Optimizer, every: int, body: Body,
               count: int = 2, **options: Any) -> list[Any]:
    """Run `body(tables, rank)` on `count` groups of virtual ranks; return results by global rank.
    """
    own = case.with_optimizer(optimizer.name)

    def on_rank(groups: ReplicaGroups) -> Any:
        number = groups.counterparts.rank
        # The rows of the first group are used.
        weights = {name: weight + number for name, weight in rs.initial_weights(case).items()}
        tables = open_in_group(groups, rp.with_tables(plan, own.tables), case.features, optimizer,
                               weights)
        try:
            return body(tables, groups.whole.rank)
        finally:
            tables.close()

    return run_in_groups(on_rank, plan.world_size, every, count, **options)


def train(tables: ShardedTables, case: rs.Case, batch: rs.Batch) -> torch.Tensor:
    out = tables.lookup(batch.lookup(case))
    rs.rank_loss(out, batch.target).backward()
    return out.detach().clone()


def trained(case: rs.Case, plan: Plan, steps: list[list[rs.Batch]], optimizer: Optimizer,
            every: int, **options: Any) -> rs.Result:
    """Train in groups; assert that all groups are bitwise equal after a synchronization."""
    def body(tables: ShardedTables, rank: int) -> rs.Result:
        outputs = [[train(tables, case, batches[rank])] for batches in steps]
        tables.replicas.synchronize()
        tables.barrier()
        result = rs.Result(
            outputs, {t.name: tables.read(t.name) for t in case.tables},
            {f"{t.name} {part}": tables.read(t.name, part=part)
             for t in case.tables for part, _ in STATE_PARTS[optimizer.name]},
            {(t.name, 0): tables.replica_view(tables.pieces[t.name][0], tables.group.rank).clone()
             for t in case.tables})
        tables.barrier()
        return result

    ranks = run_groups(case, plan, optimizer, every, body, **options)
    for k, other in enumerate(ranks[1:], 1):
        first = ranks[k % plan.world_size]  # each rank of a group has its own replicas
        rs.same_bits(rs.Result([], other.weights, other.states, other.replicas),
                     rs.Result([], ranks[0].weights, ranks[0].states, first.replicas),
                     "groups", True)
    return rs.Result([[r.outputs[s][0] for r in ranks] for s in range(len(steps))],
                     ranks[0].weights, ranks[0].states)


@torch.no_grad()
def average(base: torch.Tensor, changed: list[torch.Tensor], values: list[torch.Tensor],
            of_all: bool) -> torch.Tensor:
    """Compute the mean of each row over all groups, or over those that changed it."""
    weight = torch.stack([torch.ones_like(c) if of_all else c for c in changed]).float()
    stacked = torch.stack(values)
    weight = weight.reshape(*weight.shape, *[1] * (stacked.dim() - 2))
    mean = (stacked * weight).sum(0) / weight.sum(0).clamp(min=1)
    any_changed = torch.stack(changed).any(0)
    return torch.where(any_changed.reshape(-1, *[1] * (base.dim() - 1)), mean, base)


# Sums or averages of squared gradients, which are never negative.
SQUARES = {"rowwise_adagrad": "momentum1", "adagrad": "momentum1", "adam": "momentum2"}


def replaced(now: torch.Tensor, sent: torch.Tensor, mean: torch.Tensor, is_squares: bool
             ) -> torch.Tensor:
    """Return the average of values that were `sent`, with the changes since then.

    Changes are differences; those of squares, which may have decayed, are ratios.
    """
    if is_squares:
        return torch.where(now < sent, mean * now / sent, mean + now - sent)
    return mean + now - sent


def rounded(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Round rows [n, dim] as in a message with `bits` bits per number."""
    if bits == 32:
        return rows.clone()
    if bits == 16:
        return rows.bfloat16().float()
    least = rows.min(dim=1, keepdim=True).values
    step = (rows.max(dim=1, keepdim=True).values - least) / 255
    codes = torch.where(step > 0, (rows - least) / step, torch.zeros_like(rows))
    return least + step * (codes + 0.5).floor()


def simulated(case: rs.Case, steps: list[list[rs.Batch]], optimizer: Optimizer, every: int,
              count: int, delay: int = 0, bits: int = 32) -> rs.Result:
    """Simulate groups that train separately and are averaged after every `every` updates.

    Averages arrive `delay` updates later. Rows are sent with `bits` bits per number, and exactly at
    the end: first those that have changed, then those that are only rounded.
    """
    size = len(steps[0]) // count
    of_all = optimizer.name in ("sgd", "momentum_sgd")
    groups = [{n: w.clone().requires_grad_() for n, w in rs.initial_weights(case).items()}
              for _ in range(count)]
    states = [{n: first_states(optimizer, w.detach()) for n, w in g.items()} for g in groups]
    changed = [{t.name: torch.zeros(t.num_rows, dtype=torch.bool) for t in case.tables}
               for _ in range(count)]
    inexact = [{name: torch.zeros_like(x) for name, x in c.items()} for c in changed]
    outputs = []
    sent: list[Any] = []  # (table, part, mean, rows in it, values of the groups when sent)
    due = 0  # the update after which the values `sent` arrive

    def values(name: str, part: str) -> list[torch.Tensor]:
        return [g[name].detach() if part == "rows" else s[name][part]
                for g, s in zip(groups, states, strict=True)]

    def send(bits: int, again: bool = False) -> None:
        for name in groups[0]:
            marks = [of[name].clone() for of in (inexact if again else changed)]
            union = torch.stack(marks).any(0)
            senders = [union if of_all else x for x in marks]
            for part in ("rows", *states[0][name]):
                before = [x.clone() for x in values(name, part)]
                if part == "rows":
                    before = [torch.where(x[:, None], rounded(rows, bits), rows)
                              for rows, x in zip(before, senders, strict=True)]
                mean = average(before[0], marks, before, of_all)
                sent.append((name, part, mean, union, before))
            for c, of, x in zip(changed, inexact, senders, strict=True):
                c[name].zero_()
                of[name] = of[name] & ~union | x & (bits < 32)

    def arrive() -> None:
        for name, part, mean, rows, before in sent:
            for x, y in zip(values(name, part), before, strict=True):
                x[rows] = replaced(x, y, mean, SQUARES.get(optimizer.name) == part)[rows]
        sent.clear()

    for step, batches in enumerate(steps, 1):
        outputs.append([])
        for g, weights in enumerate(groups):
            mine = batches[g * size:(g + 1) * size]
            outs = [rs.reference_forward(case, weights, b) for b in mine]
            outputs[-1] += [o.detach() for o in outs]
            losses = [rs.rank_loss(o, b.target) for o, b in zip(outs, mine, strict=True)]
            (sum(losses) / size).backward()
            for name, w in weights.items():
                touched = rs.touched_rows(case, case.table(name), mine)
                changed[g][name] |= touched
                rs.apply_optimizer(optimizer, step, w, states[g][name], w.grad, touched)
                w.grad = None
        if step == due:
            arrive()
        if step % every == 0:
            send(bits)
            due = step + delay
            if not delay:
                arrive()
    arrive()
    for again in (False, True):
        send(32, again)
        arrive()
    return rs.Result(outputs, {n: w.detach() for n, w in groups[0].items()},
                     {f"{n} {part}": x for n, of in states[0].items() for part, x in of.items()})


PLANS: dict[str, Callable[[rs.Case], Plan]] = {
    "alone": lambda case: uniform_plan(case.tables, 1),
    "striped": lambda case: uniform_plan(case.tables, 2, "striped"),
    "replicated": lambda case: uniform_plan(case.tables, 2, "replicated"),
    "mixed": lambda case: rp.mixed_plan(case.tables, 2, 1),
    "rich": lambda case: rp.rich_plan(case.tables, 2, 1, columns=True)}
