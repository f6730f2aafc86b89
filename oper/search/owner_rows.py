"""Rows of the relaxation about the owner of the largest pushed piece.

Let y be the largest load that a piece puts on its owner, in some phase and group. The phase takes
at least y, and at least y beside what the owner does as a reader. An owner reads its own piece,
too: of its own time, y is what it does more for that piece than a reader, and what else it owns
costs it the lesser of an owner's and a reader's part. Over links, reading spares what its own host
owns (itself, on a single host of n = 1): of W ranks, the n of a host own at most what they can send
in the phase T, so that with d the mean over ranks of what is read,
`T (1 + n / (W - n)) >= y + d W / (W - n)`. What is read in the forward phase T_f comes back as
gradients in the phase T_u, which limits what a host owns as well:
`T_f + n / (W - n) s T_u >= y + d W / (W - n)`, s >= 1 being the largest ratio of a row's bytes to
its gradient's.

Better still is a relaxation in which the ranks of the host (on a single host: of the memory
domain) that owns the piece are a class of their own (`Relaxation(apart=...)`): what such a reader
is spared is then part of the solution, in every phase. Hosts are interchangeable, so it is the
first, for one load at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from oper.search.machine import (
    CROSS_IN,
    CROSS_OUT,
    GROUPS,
    LINK_IN,
    LINK_OUT,
    Machine,
)
from oper.search.pieces import LOCAL, group_us, read_pairs, unit_load
from oper.search.problem import NUM_FEATURES, TableProblem
from oper.search.tally import GRADS, NUM_ROWS, PARTIALS

if TYPE_CHECKING:
    from oper.search.cost import CostModel
    from oper.search.relax import Relaxation

REPLICATED, SHARD, PUSH = "replicated", "shard", "push"
HOST = "host"  # a shard in host memory
COPIES = "copies"  # on one rank of every host
Load = tuple[int, int]  # phase and group of terms
_Limit = tuple[np.ndarray, float]  # weights of the phases' times, weight of the reader's part


def row_makers(model: CostModel) -> dict[str, Callable[[TableProblem, int, np.ndarray],
                                                       np.ndarray]]:
    """What makes tally rows of a table's rows, by the kind of what holds them."""
    return {REPLICATED: model.replica_rows, SHARD: model.shard_rows, PUSH: model.push_rows,
            HOST: model.host_rows}


def neighbourhoods(machine: Machine) -> tuple[np.ndarray, str]:
    """What ranks reach by the same slowest links: hosts, or on a single host memory domains; int64
    [W], and the links' group of terms towards a rank."""
    if (machine.host != machine.host[0]).any():
        return machine.host, "cross_in"
    return machine.domain, "link_in"


def first_neighbourhood(machine: Machine) -> list[int]:
    """The ranks of the first host; on a single host, of the first memory domain."""
    of_rank, _ = neighbourhoods(machine)
    return [int(r) for r in np.flatnonzero(of_rank == of_rank[0])]


def add_owner_rows(relaxation: Relaxation) -> list[tuple[int, int, int]]:
    """Insert the rows behind the timed ones; row, phase and group of each.

    Links must be alike for all ranks; where their own speeds are not, the owner reads as fast as
    the fastest. Rows that bound several phases together get the phase -2.
    """
    model, pieces = relaxation.model, relaxation.pieces
    pushes = any(o.kind == PUSH for o in relaxation.options)
    if (model.machine.world_size < 2 or not pushes or not model.training
            or not _links_alike(model.machine)):
        return []
    names: list[tuple[int, int]] = []
    limits: list[_Limit] = []
    first = model.phases.index("forward")
    for phase in range(first, len(model.phases)):
        for group in np.flatnonzero(pieces.unit[:, :, phase].any(axis=(0, 1))).tolist():
            found = _limits(relaxation, phase, GROUPS[group])
            names += [(phase, group)] * len(found)
            limits += found
    apart = relaxation.apart if relaxation.apart in names else None
    if apart is not None:  # what the reader's part is follows below
        names.append(apart)
        limits.append((np.eye(len(model.phases))[apart[0]], 1.0))
    weights, scale = np.array([x[0] for x in limits]), np.array([x[1] for x in limits])
    at = tuple(np.array(names, np.int64).T)
    start = int((relaxation.phase_of >= 0).sum())
    where = np.full(len(names), start)
    plain = (weights.sum(axis=1) == 1.0) & (weights[np.arange(len(names)), at[0]] == 1.0)
    relaxation.phase_of = np.insert(relaxation.phase_of, where, np.where(plain, at[0], -2))
    relaxation.phase_weight = np.insert(relaxation.phase_weight, where, weights, axis=0)
    units = _reader_units(relaxation)
    plain_unit = relaxation.unit
    least = np.minimum(units.other, units.own).min(axis=0)[:, at[0], at[1]]
    relaxation.unit = np.insert(relaxation.unit, where, scale * least[None], axis=2)
    read = np.zeros(plain_unit.shape[:2])
    if apart is not None:
        read = _host_reads(relaxation, apart, plain_unit)
        relaxation.unit[:, :, start + len(names) - 1] = read
    # Loads exceed the phases by the dense compute that hides them, at most.
    hidden = pieces.hidden.max(axis=0)[:, 0]
    base = scale * pieces.floor.min(axis=0)[at] - weights @ hidden
    relaxation.base = np.insert(relaxation.base, where, base)
    once = np.zeros((len(relaxation.tables), len(relaxation.options), NUM_FEATURES, len(names)))
    more = np.zeros_like(once)
    for kind in {o.kind for o in relaxation.options}:
        alike = [o for o, option in enumerate(relaxation.options) if option.kind == kind]
        for k, t in enumerate(relaxation.tables):
            dim = t.spec.dim
            load = _reader(relaxation, t, kind, dim, units)
            once[k, alike] = scale * load.min(axis=(0, 1))[:, at[0], at[1]]
            if kind == PUSH:
                twice = _reader(relaxation, t, PUSH, 2 * dim, units)
                more[k, alike] = scale * (2 * load - twice).min(axis=(0, 1))[:, at[0], at[1]]
    if apart is not None:
        for o in range(len(relaxation.options)):
            _host_coefficients(relaxation, o, read, once, more)
    relaxation.coefficients = _inserted(relaxation.coefficients, start, once)
    relaxation.per_stream = _inserted(relaxation.per_stream, start, more)
    return [(start + n, p, g) for n, (p, g) in enumerate(names)]


def _host_reads(relaxation: Relaxation, apart: Load, unit: np.ndarray) -> np.ndarray:
    """What a unit of each tally row, spread over a class, puts on a reader of the first
    neighbourhood beside what its owner does; float64 [C, 20].

    Through the links between hosts, all ranks of a host read alike: whatever other hosts own.
    """
    phase, group = apart
    pieces, classes = relaxation.pieces, relaxation.classes
    mine = int(classes.of_rank[0])
    row = relaxation.row_names.index((phase, GROUPS[group], mine))
    out = unit[:, :, row].copy()
    out[mine] -= pieces.unit[mine, :, phase, group] / classes.ranks[mine].size
    return out


def _host_coefficients(relaxation: Relaxation, o: int, read: np.ndarray, once: np.ndarray,
                       more: np.ndarray) -> None:
    """Fill in the last row of `once` and `more` for option `o`."""
    model, option = relaxation.model, relaxation.options[o]
    world = model.machine.world_size
    if option.kind == COPIES:  # asks something of that reader, or nothing
        return
    make = row_makers(model)
    spread = np.full(world, 1 / world) if option.rank_class < 0 else (
        relaxation.spread(option.rank_class))
    owner = np.eye(NUM_FEATURES)[:, :, None] * spread
    for k, t in enumerate(relaxation.tables):
        found = []
        for width in (t.spec.dim, 2 * t.spec.dim):
            by_class = relaxation.by_class(make[option.kind](t, width, owner))
            found.append(np.einsum("fqc,cq->f", by_class, read))
        once[k, o, :, -1] = found[0]
        if option.kind == PUSH:
            more[k, o, :, -1] = 2 * found[0] - found[1]


def _links_alike(machine: Machine) -> bool:
    links = machine.seconds_per_unit[[LINK_IN, LINK_OUT, CROSS_IN, CROSS_OUT]]
    return all(bool((x == x[..., :1]).all()) for x in (links, machine.num_near, machine.num_host))


def _inserted(wide: np.ndarray, start: int, new: np.ndarray) -> np.ndarray:
    return np.concatenate([wide[..., :start], new, wide[..., start:]], axis=-1)


def _limits(relaxation: Relaxation, phase: int, group: str) -> list[_Limit]:
    """The rows of one phase and group."""
    machine, num_phases = relaxation.model.machine, len(relaxation.model.phases)
    world, near = float(machine.world_size), float(machine.num_host[0])
    one = np.eye(num_phases)[phase]
    if group == "local":
        return [(one, 1.0 if relaxation.pieces.beside_reader else 0.0)]
    if group.startswith("link"):
        near = 1.0 if near == world else world
    if near == world:
        return [(one, 0.0)]
    ratio, scale = near / (world - near), world / (world - near)
    out = [(one, 0.0), (one * (1.0 + ratio), scale)]
    if relaxation.model.phases[phase] == "forward" and group.endswith("in"):
        most = max((t.spec.row_bytes / (4.0 * t.spec.dim) for t in relaxation.tables), default=1.0)
        own = relaxation.pieces.unit[0, :, :, GROUPS.index(group)]
        sums, rows = (own[q].copy() for q in (PARTIALS, GRADS))
        sums[phase] = rows[phase] = 0.0
        if sums.any() and rows.any():
            # Phases in which an owner receives what it sent; both amounts when it is the same.
            back = np.maximum(np.eye(num_phases)[int(sums.argmax())],
                              most * np.eye(num_phases)[int(rows.argmax())])
            out.append((one + ratio * back, scale))
    return out


class _Units(NamedTuple):
    """What a unit of each tally row costs a rank, by its class; float64 [C, 20, P, 5].

    Attributes:
        other: when one other rank has it (over links: the mean over all ranks).
        own: when it has it itself; over links as `other`.
        every: when all ranks have it.
    """

    other: np.ndarray
    own: np.ndarray
    every: np.ndarray


def _reader_units(relaxation: Relaxation) -> _Units:
    model, classes = relaxation.model, relaxation.classes
    world, first = model.machine.world_size, [int(r[0]) for r in classes.ranks]
    alone = {o: unit_load(model, o) for o in {0, 1, *first}}  # [20, P, 5, W] each
    other = np.stack([alone[0][..., 1:].sum(axis=-1) / world] * len(first))
    own = other.copy()
    for c, (owner, readers) in enumerate(read_pairs(classes)):
        other[c, ..., LOCAL] = alone[owner][:, :, LOCAL, readers].min(axis=-1)
        own[c, ..., LOCAL] = alone[first[c]][:, :, LOCAL, first[c]]
    every = np.broadcast_to(np.eye(NUM_ROWS)[:, :, None], (NUM_ROWS, NUM_ROWS, world))
    return _Units(other, own, np.moveaxis(group_us(model, every)[..., first], -1, 0))


def _reader(relaxation: Relaxation, t: TableProblem, kind: str, width: int,
            units: _Units) -> np.ndarray:
    """Load of a unit of each feature on a rank that owns nothing, and on one that owns the unit,
    which differs in its own time alone, by class of the rank; float64 [2, C, 4, P, 5]."""
    model, classes = relaxation.model, relaxation.classes
    shape = (2, len(classes.ranks), NUM_FEATURES, *units.other.shape[2:])
    if kind == COPIES:  # a rank with a copy reads no less than one that owns nothing
        return np.zeros(shape)
    out = np.empty(shape)
    for c, (owner, readers) in enumerate(read_pairs(classes)):
        mine = int(classes.ranks[c][0])
        rows = {rank: row_makers(model)[kind](t, width, _owned_by(model, rank))
                for rank in {owner, mine}}
        read = rows[owner][..., readers[0]]
        both = np.einsum("fq,qpg->fpg", read, units.every[c])
        more = rows[mine][..., mine] - read
        out[:, c] = [both + np.einsum("fq,qpg->fpg", more, unit[c])
                     for unit in (units.other, units.own)]
    return out


def _owned_by(model: CostModel, rank: int) -> np.ndarray:
    """A unit of each feature, one at a time, on a rank; float64 [4, 4, W]."""
    owner = np.zeros((NUM_FEATURES, NUM_FEATURES, model.machine.world_size))
    owner[np.arange(NUM_FEATURES), np.arange(NUM_FEATURES), rank] = 1.0
    return owner
