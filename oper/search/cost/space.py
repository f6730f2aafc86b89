"""The space of plans to which a bound applies, and its parts.

The space is part of the statement of the problem: the relaxation bounds its plans, and the checker
tests whether a plan is in it. Neither depends on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import reduce

import numpy as np

from oper.plan import Piece, Plan, Tier
from oper.rows.traffic import ROW_WISE
from oper.search.cost.load_vector import NUM_ROWS, LoadVector
from oper.search.cost.model import CostModel, Evaluation, is_ordered
from oper.search.problem.constraints import TableConstraint, violations
from oper.search.problem.machine import RankClasses, copy_sets, neighbourhoods, rank_classes
from oper.search.problem.space import (
    COLUMN_STEP,
    MAX_REPLICATED,
    MIN_COLUMNS,
    STILL,
    WITH_COLUMNS,
    used_by,
)
from oper.search.problem.statement import NUM_FEATURES, Problem, TableProblem

#: Ways to hold rows that are not pinned: replicated on all ranks; copied to one rank of every host;
#: pulled from owners, in device memory or in host memory; pushed.
KINDS = REPLICATED, COPIES, SHARD, HOST, PUSH = "replicated", "copies", "shard", "host", "push"
_MAX_HIDDEN_SETS = 4  # distinct amounts of overlapping compute that separate classes of ranks


def restricted(problem: Problem, plans: Collection[str]) -> Problem:
    """The problem restricted to the kinds of plans `plans`, from `oper.search.problem.space.PLANS`.

    In the restricted problem, plans that push rows have no copies per host, and column splits are
    allowed only with pushed columns, since splits of other tables only add cost.
    """
    if "push" not in problem.allow:
        return problem
    without = {"per_host"} if set(plans) - {STILL} else {"push"}
    if WITH_COLUMNS not in plans:
        without |= {"columns"}
    return replace(problem, allow=problem.allow - without)


def may_hold(problem: Problem, name: str, kind: str, rank: int) -> bool:
    """Return whether the constraints allow rows of table `name` to be held as `kind`, one of
    `KINDS`; `rank` is their owner, ignored for replicated and copied rows."""
    places, ranks = problem.placements_of(name), problem.held(name).ranks
    if kind in (REPLICATED, COPIES):
        return "replicated" in places
    return (("host" if kind == HOST else "device") in problem.memories_of(name)
            and ("push" if kind == PUSH else "pull") in problem.modes_of(name)
            and bool(places & {"striped", "owned"})
            and (ranks is None or rank in ranks))


def row_makers(model: CostModel) -> dict[str, Callable[[TableProblem, int, np.ndarray],
                                                       np.ndarray]]:
    """Return, for each kind of `KINDS` except COPIES, the function that computes the load vector of
    a table's rows that are held in this way; for COPIES see `copy_load_vectors`.
    """
    return {REPLICATED: model.replica_rows, SHARD: model.shard_rows, PUSH: model.push_rows,
            HOST: model.host_rows}


def copy_load_vectors(model: CostModel, t: TableProblem) -> list[LoadVector]:
    """Load vectors of one unit of each feature for rows of a table that are copied to one rank of
    every host.

    The choice of the rank does not matter, since all ranks are interchangeable. A changed row is
    sent to each host once, instead of to each rank as with replicas on all ranks; in exchange, the
    other ranks of a host read the row from a neighbour.
    """
    ranks, out = copy_sets(model.machine)[0], []
    tier = Tier(0, t.spec.num_rows, "replicated", ranks)
    for masters in np.eye(NUM_FEATURES):
        owner = np.outer(masters, np.isin(np.arange(model.machine.world_size), ranks))
        out.append(model.subset_load_vector(t, t.spec.dim, tier, owner / len(ranks)))
    return out


def free_blocks(problem: Problem, t: TableProblem) -> np.ndarray:
    """Features of each block of a table, not counting pinned rows; float64 [K, 4]."""
    out = t.blocks.copy()
    for tier in problem.held(t.spec.name).pinned:
        out -= np.diff(t.prefix(np.clip(t.edges, tier.start, tier.stop)), axis=1).T
    return np.maximum(out, 0.0)


def most_masters(problem: Problem, t: TableProblem, sizes: np.ndarray) -> np.ndarray:
    """Upper limit of the master copies of a block's replicated rows that one class of ranks may
    hold.

    Master copies are assigned round-robin, so each rank has one of any W consecutive rows of a
    tier. The rows of a block are interchangeable, so only the incomplete last round of each tier
    can favour some classes.

    Args:
        sizes: int64 [C], ranks of each class.

    Returns:
        float64 [C], rows by class; infinite if the hotness order of the rows is unknown.
    """
    if not t.ids_are_positions:
        return np.full(sizes.size, np.inf)
    tiers = MAX_REPLICATED + len(problem.held(t.spec.name).pinned)
    world = sizes.sum()
    return np.array([tiers * (world - np.delete(sizes, c).min(initial=world - 1))
                     for c in range(sizes.size)], float)


def fixed_load_vectors(model: CostModel) -> tuple[LoadVector, LoadVector]:
    """The parts of the load vector that every plan has.

    Returns:
        The load vector of outputs and of tables whose rows are all pinned; and the load vector of
        the pinned rows of tables that also have free rows, as a single column piece.
    """
    problem, base = model.problem, model.base()
    pinned = [LoadVector(np.zeros((NUM_ROWS, model.machine.world_size)))]
    for t in problem.tables:
        held = problem.held(t.spec.name)
        tiers = held.pinned
        ordered = _is_taken_as_ordered(t, held, True)
        if held.tiers is not None:
            base = base.plus(model.load_vector(t, (Piece(0, t.spec.dim, held.tiers),), ordered))
        elif tiers:
            # Partial sums are concave in the mass of an owner: if the owner also has other pushed
            # rows, pinned rows may add no partial sums.
            alone = "push" not in problem.modes_of(t.spec.name) or _is_whole(t, tiers)
            pinned.append(model.piece_load_vector(t, Piece(0, t.spec.dim, tiers), ordered, alone))
    return base, reduce(LoadVector.plus, pinned)


def is_cut(pieces: tuple[Piece, ...]) -> bool:
    """Whether any piece has several tiers, so that the plan must store the table's hotness order.
    """
    return any(len(p.tiers) > 1 for p in pieces)


def table_load_vector(model: CostModel, t: TableProblem, pieces: tuple[Piece, ...]) -> LoadVector:
    """Load vector of a table's placement, in hotness order if it is cut by rows."""
    return model.load_vector(t, pieces, t.ids_are_positions or is_cut(pieces))


def hosts_are_interchangeable(model: CostModel) -> bool:
    """Whether hosts (on a single host: memory domains) are interchangeable.

    They are if machine, overlapping dense compute and constraints are the same for all of them.
    """
    of_rank, _ = neighbourhoods(model.machine)
    pinned = [x.ranks for c in model.problem.constraints.tables.values() for x in c.pinned]
    classes = model_classes(model, [*pinned, *_equally_hidden(model)]).ranks
    members = [np.bincount(of_rank[r], minlength=int(of_rank.max()) + 1) for r in classes]
    return all((n == n[0]).all() for n in members)


def _equally_hidden(model: CostModel) -> list[list[int]]:
    """Sets of ranks whose phases overlap with the same amount of dense compute."""
    return [np.flatnonzero((model.hidden == x[:, None]).all(axis=0)).tolist()
            for x in np.unique(model.hidden, axis=1).T]


def model_classes(model: CostModel, distinguished: Iterable[Iterable[int]] = ()) -> RankClasses:
    """Classes of ranks that are interchangeable under the machine, the constraints and the sets of
    ranks `distinguished`.

    Dense compute that overlaps with phases also separates ranks, but only if it takes few distinct
    values: with many values, averaging over unequal ranks gives a looser bound, but keeps the
    relaxation small.
    """
    held = model.problem.constraints.tables.values()
    hidden = _equally_hidden(model)
    return rank_classes(model.machine, [
        *(c.ranks for c in held if c.ranks is not None),
        *(tier.ranks for c in held for tier in c.tiers or ()),
        *(hidden if len(hidden) <= _MAX_HIDDEN_SETS else ()), *distinguished])


def has_copies(model: CostModel) -> bool:
    """Whether plans without pushed rows may have replicas on one rank of every host.

    They may if the space allows it and all ranks are interchangeable. With unequal ranks, the
    relaxation would not bound all choices of the rank.
    """
    return ("per_host" in model.problem.allow and bool(copy_sets(model.machine))
            and len(model_classes(model).ranks) == 1)


def may_rest(problem: Problem, name: str) -> bool:
    """Whether table `name` can be placed without pushing rows."""
    places, pinned = problem.placements_of(name), problem.held(name).pinned
    if sum(x.stop - x.start for x in pinned) == problem.table(name).spec.num_rows:
        return not all(x.mode == "push" and x.placement != "replicated" for x in pinned)
    return "replicated" in places or ("pull" in problem.modes_of(name) and bool(places))


def splits_pay(problem: Problem) -> bool:
    """Whether every column split costs a barrier, for exchanging sums of squared gradients."""
    return problem.training and all(
        t.spec.optimizer in ROW_WISE for t in problem.free_tables if problem.may_split(t))


def no_solution(plan: Plan, problem: Problem, found: Evaluation) -> str:
    """The reason why the bound does not apply to this plan and its evaluation; "" if it does."""
    if not found.fits:
        return "the plan does not fit the memory"
    if plan.message_bits != problem.message_bits:
        return "the plan is for other message bits"
    if broken := violations(plan, problem.constraints):
        return f"the plan breaks a constraint: {broken[0]}"
    outside = outside_space(plan, problem)
    return f"the plan lies outside the space of the bound: {outside}" if outside else ""


def outside_space(plan: Plan, problem: Problem) -> str:
    """Name the first part of the plan that the relaxation does not represent; "" if there is none.

    Pinned tables and rows are skipped: the relaxation prices them exactly.
    """
    free = [(t, piece, tier) for t in problem.tables for piece in plan.table(t.spec.name).pieces
            for tier in piece.tiers if not _is_pinned(problem, t, tier)]
    pushes = any(x.mode == "push" and x.placement != "replicated" for _, _, x in free)
    copies: bool | None = None
    for t, piece, tier in free:
        name = f"table {t.spec.name!r}"
        extra = sorted(used_by(tier, plan.world_size) - problem.allow)
        if extra:
            return f"{name} uses {extra}, which the plan space does not include"
        if len(plan.table(t.spec.name).pieces) > 1 and not problem.may_split(t):
            return f"{name} is cut by columns"
        if tier.memory == "host" and (tier.placement == "replicated" or tier.mode == "push"):
            return f"{name} has rows in host memory that are not pulled"
        if tier.placement == "replicated":
            if len(tier.ranks) < plan.world_size:
                copies = has_copies(CostModel(problem)) if copies is None else copies
                if not copies or pushes or not _one_per_host(problem, tier):
                    return f"{name} is replicated on ranks {list(tier.ranks)}"
        elif tier.mode == "push" and not _has_width(t, piece):
            return f"{name} pushes columns {piece.start}:{piece.stop}"
    for t in problem.tables:
        held, entry = problem.held(t.spec.name), plan.table(t.spec.name)
        if any(sum(x.placement == "replicated" and len(x.ranks) == plan.world_size
                   and not _is_pinned(problem, t, x) for x in piece.tiers)
               > MAX_REPLICATED + len(held.pinned) for piece in entry.pieces):
            return f"table {t.spec.name!r} has more than {MAX_REPLICATED} replicated tiers"
        ordered = is_ordered(t, entry)
        if ordered != _is_taken_as_ordered(t, held, ordered):
            return (f"table {t.spec.name!r} has {'a' if ordered else 'no'} hotness order, but the "
                    f"bound priced its pinned rows with{'out' if ordered else ''} one")
        if held.pinned and not ordered and any(len(p.tiers) > 1 for p in entry.pieces):
            return f"table {t.spec.name!r} has pinned rows, but no hotness order"
    return ""


def _is_taken_as_ordered(t: TableProblem, held: TableConstraint, other: bool) -> bool:
    """Whether the relaxation treats positions in the table as hotness ranks if all its rows are
    pinned; `other` if some rows are free."""
    if held.tiers is not None:
        return t.ids_are_positions or len(held.tiers) > 1
    return t.ids_are_positions if _is_whole(t, held.pinned) else other


def _is_whole(t: TableProblem, tiers: tuple[Tier, ...]) -> bool:
    """Whether the tiers are a single one of all rows."""
    return len(tiers) == 1 and tiers[0].stop - tiers[0].start == t.spec.num_rows


def _is_pinned(problem: Problem, t: TableProblem, tier: Tier) -> bool:
    held = problem.held(t.spec.name)
    return held.tiers is not None or tier in held.pinned


def _one_per_host(problem: Problem, tier: Tier) -> bool:
    hosts = problem.machine.host[list(tier.ranks)].tolist()
    return sorted(hosts) == list(range(int(problem.machine.host.max()) + 1))


def _has_width(t: TableProblem, piece: Piece) -> bool:
    """Whether `oper.search.relaxation.pieces` contains pushed pieces of this width."""
    width = piece.stop - piece.start
    return width == t.spec.dim or (width >= MIN_COLUMNS and (
        width % COLUMN_STEP == 0 or (t.spec.dim - width) % COLUMN_STEP == 0))
