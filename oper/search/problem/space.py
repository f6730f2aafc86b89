"""The plan space: placements, exchange modes, column splits and host memory that a plan may use."""

from __future__ import annotations

from collections.abc import Iterable

from oper.errors import InvalidInputError
from oper.plan import PLACEMENTS, Plan, Tier
from oper.topology import Topology

#: ``host``: pulled rows in the memory of their owner's host, if the topology has host memory.
#: ``per_host``: replicas on one rank of every host instead of all, in plans that push nothing,
#: if all ranks are interchangeable and no constraint distinguishes them.
FEATURES = frozenset({*PLACEMENTS, "pull", "push", "columns", "host", "per_host"})
#: The default of `make_plan` for one memory domain. The host runtime also executes pushed tiers and
#: column pieces, but they never pay among ranks that share a memory.
EXECUTABLE = frozenset({"replicated", "striped", "owned", "pull"})
#: The default for several domains of one host; pushed rows send partial sums instead of rows.
ACROSS_DOMAINS = EXECUTABLE | {"push"}
#: The default for several hosts; adds column splits, for tables with more lookups than one rank
#: should pool, and one copy per host instead of one per rank.
ACROSS_HOSTS = ACROSS_DOMAINS | {"columns", "per_host"}
#: All features except for copies per host.
EVERYTHING = FEATURES - {"per_host"}

#: Upper limit of the tiers of a column piece that are replicated on all ranks and not pinned.
MAX_REPLICATED = 8

#: Pushed column pieces have at least MIN_COLUMNS columns, one memory sector of float32. Their
#: widths are multiples of COLUMN_STEP, a vector load, except for the remainder of the columns.
MIN_COLUMNS, COLUMN_STEP = 8, 4

#: Kinds of plans by the barriers that they pay: none for pushed rows; one, for partial sums; one
#: more, if owners of the columns of a row exchange sums of squares.
PLANS = STILL, WITH_ROWS, WITH_COLUMNS = "nothing pushed", "rows pushed", "columns pushed"


def executed_space(topology: Topology) -> frozenset[str]:
    """The features that plans for `topology` may use by default, also in `oper.shard`."""
    if len(topology.domains) == 1:
        return EXECUTABLE
    return ACROSS_DOMAINS if topology.num_hosts == 1 else ACROSS_HOSTS


def check_allow(allow: Iterable[str]) -> frozenset[str]:
    """Return `allow` as a set; raises InvalidInputError for an unknown feature, or if a placement
    or an exchange mode is missing."""
    named: list[object] = list(allow) if isinstance(allow, Iterable) else [allow]  # unchecked JSON
    chosen = frozenset(x for x in named if isinstance(x, str))
    known = all(isinstance(x, str) for x in named) and chosen <= FEATURES
    if not known or not chosen & set(PLACEMENTS) or not chosen & {"pull", "push"}:
        raise InvalidInputError(
            "invalid search space", "allow", named,
            f"some of {sorted(FEATURES)} with at least one placement and one exchange mode",
            "name at least one placement and one exchange mode")
    return chosen


def used_features(plan: Plan, names: Iterable[str] | None = None) -> frozenset[str]:
    """Names of `FEATURES` that a plan uses, not counting the mode of replicated tiers.

    Args:
        plan: the plan.
        names: the tables that count, since `allow` is not about tables that constraints pin; None =
            all.
    """
    tables = plan.tables if names is None else [plan.table(name) for name in names]
    split = {"columns"} if any(len(t.pieces) > 1 for t in tables) else set()
    return frozenset(split.union(*(used_by(tier, plan.world_size) for t in tables
                                   for piece in t.pieces for tier in piece.tiers)))


def used_by(tier: Tier, world_size: int) -> frozenset[str]:
    """Names of `FEATURES` that one tier uses."""
    used = {tier.placement}
    if tier.placement != "replicated":
        used.add(tier.mode)
    elif len(tier.ranks) < world_size:
        used.add("per_host")
    return frozenset(used | ({"host"} if tier.memory == "host" else set()))
