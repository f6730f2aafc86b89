"""Random plans of the runtime's tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.tables import TableSpec


def mixed_plan(tables: Sequence[TableSpec], world_size: int, seed: int) -> Plan:
    """Make a plan with tiers of all kinds, explicit heads, weighted stripes, and replicas on some
    ranks only."""
    rng = np.random.default_rng(seed)
    entries = []
    for t in tables:
        head = rng.permutation(t.num_rows)[: int(rng.integers(0, t.num_rows + 1))]
        cuts = np.unique(rng.integers(0, t.num_rows + 1, int(rng.integers(0, 5))))
        cuts = sorted({0, t.num_rows, *cuts.tolist()})
        tiers = [_random_tier(rng, a, b, world_size) for a, b in itertools.pairwise(cuts)]
        entries.append(TablePlan(t, (Piece(0, t.dim, tuple(tiers)),), head.astype(np.int64)))
    return Plan(world_size, tuple(entries))


def _random_tier(rng: np.random.Generator, start: int, stop: int, world_size: int) -> Tier:
    placement = ("replicated", "striped", "owned")[int(rng.integers(0, 3))]
    ranks = rng.permutation(world_size)[: int(rng.integers(1, world_size + 1))].tolist()
    if placement == "owned":
        ranks = ranks[:1]
    weights = ()
    if placement == "striped" and rng.random() < 0.7:
        weights = tuple(rng.integers(1, 6, len(ranks)).tolist())
    return Tier(start, stop, placement, tuple(ranks), weights)


def rich_plan(tables: Sequence[TableSpec], world_size: int, seed: int, columns: bool) -> Plan:
    """Make a plan with random tiers, also pushed and in host memory, and random column pieces."""
    rng = np.random.default_rng(seed)
    entries = []
    for t in tables:
        cuts = {0, t.dim}
        if columns and t.dim > 4 and t.may_be_split:
            cuts |= set(rng.integers(1, t.dim, 2).tolist())
        edges = sorted(cuts)
        pieces = tuple(Piece(a, b, _random_tiers(rng, t.num_rows, world_size))
                       for a, b in itertools.pairwise(edges))
        head = rng.permutation(t.num_rows)[: int(rng.integers(0, t.num_rows + 1))]
        entries.append(TablePlan(t, pieces, head))
    return Plan(world_size, tuple(entries))


def _random_tiers(rng: np.random.Generator, num_rows: int, world_size: int) -> tuple[Tier, ...]:
    inner = set(rng.integers(1, num_rows, 3).tolist()) if num_rows > 1 else set()
    edges = sorted({0, num_rows} | inner)
    tiers = []
    for start, stop in itertools.pairwise(edges):
        ranks = tuple(rng.permutation(world_size)[: int(rng.integers(1, world_size + 1))].tolist())
        kind = rng.choice(["replicated", "striped", "owned", "pushed", "pushed"])
        if kind == "owned":
            mode = str(rng.choice(["pull", "push"]))
            tiers.append(Tier(start, stop, "owned", ranks[:1], mode=mode))
        elif kind == "replicated":
            tiers.append(Tier(start, stop, "replicated", ranks))
        else:
            weights = tuple(rng.integers(1, 4, len(ranks)).tolist())
            mode = "push" if kind == "pushed" else "pull"
            tiers.append(Tier(start, stop, "striped", ranks, weights, mode))
    return tuple(replace(x, memory="host") if rng.random() < 0.4 else x for x in tiers)


def in_columns(tables: Sequence[TableSpec], world_size: int, placement: str = "owned") -> Plan:
    """Make a plan with up to three column pieces per table, which start at no multiple of eight and
    are striped, or owned by different ranks."""
    entries = []
    for k, t in enumerate(tables):
        cuts = {t.dim // 3, t.dim // 2 + 1} if t.dim > 3 and t.may_be_split else set()
        (tier,) = uniform_plan([t], world_size, "striped").tables[0].tiers
        entries.append(TablePlan(t, tuple(
            Piece(a, b, (tier if placement == "striped" else
                         replace(tier, placement="owned", ranks=((k + a) % world_size,)),))
            for a, b in itertools.pairwise(sorted({0, t.dim} | cuts)))))
    return Plan(world_size, tuple(entries))


def plans_for(tables: Sequence[TableSpec], world_size: int) -> dict[str, Plan]:
    """Return the plans that every exactness test uses."""
    plans = {p: uniform_plan(tables, world_size, p) for p in ("replicated", "striped", "owned")}
    for seed in range(3):
        plans[f"mixed{seed}"] = mixed_plan(tables, world_size, seed)
    return plans


def with_tables(plan: Plan, tables: Iterable[TableSpec]) -> Plan:
    """Return the plan for tables of the same names with other optimizers or dtypes."""
    return replace(plan, tables=tuple(replace(plan.table(t.name), table=t) for t in tables))
