"""What a planner may use: placements, exchange modes, column splits and host memory."""

from __future__ import annotations

from collections.abc import Iterable

from oper.errors import InvalidInputError
from oper.plan import PLACEMENTS, Plan, Tier
from oper.topology import Topology

#: ``host``: pulled rows in the memory of their owner's host, where the topology has some.
#: ``per_host``: replicas on one rank of every host instead of all, in plans that push nothing,
#: where all ranks are alike and no constraint tells them apart.
FEATURES = frozenset({*PLACEMENTS, "pull", "push", "columns", "host", "per_host"})
#: The default of `make_plan`. The host runtime executes pushed tiers and column pieces as well, but
#: among ranks that share a memory they never pay.
EXECUTABLE = frozenset({"replicated", "striped", "owned", "pull"})
#: What pays where ranks share no memory: partial sums instead of rows.
ACROSS_DOMAINS = EXECUTABLE | {"push"}
#: And where these are on several hosts: partial sums of columns, where a table is more than one
#: rank should pool, and a copy per host instead of one per rank.
ACROSS_HOSTS = ACROSS_DOMAINS | {"columns", "per_host"}
#: All that the search knows, except for copies per host.
EVERYTHING = FEATURES - {"per_host"}

#: Tiers of a column piece that are replicated on all ranks and not pinned, at most.
MAX_REPLICATED = 8

#: Pieces of columns that are pushed are at least so wide, one memory sector of float32, and their
#: edges are multiples of a vector load, except for what is left of a row beside them.
MIN_COLUMNS, COLUMN_STEP = 8, 4

#: Plans by the barriers that they pay: none for pushed rows, one for partial sums, and one more
#: where owners of the columns of a row exchange sums of squares.
PLANS = STILL, WITH_ROWS, WITH_COLUMNS = "nothing pushed", "rows pushed", "columns pushed"


def executed_space(topology: Topology) -> frozenset[str]:
    """What plans for `topology` may use by default, also in `oper.shard`."""
    if len(topology.domains) == 1:
        return EXECUTABLE
    return ACROSS_DOMAINS if topology.num_hosts == 1 else ACROSS_HOSTS


def check_allow(allow: Iterable[str]) -> frozenset[str]:
    """`allow` as a set; raises InvalidInputError unless it contains a placement and an exchange
    mode."""
    named: list[object] = list(allow) if isinstance(allow, Iterable) else [allow]  # of a file
    chosen = frozenset(x for x in named if isinstance(x, str))
    known = all(isinstance(x, str) for x in named) and chosen <= FEATURES
    if not known or not chosen & set(PLACEMENTS) or not chosen & {"pull", "push"}:
        raise InvalidInputError(
            "invalid search space", "allow", named,
            f"some of {sorted(FEATURES)} with at least one placement and one exchange mode",
            "name what the plan may use")
    return chosen


def used_features(plan: Plan) -> frozenset[str]:
    """Names of `FEATURES` that a plan uses; the mode of replicated tiers does not count."""
    split = {"columns"} if any(len(t.pieces) > 1 for t in plan.tables) else set()
    return frozenset(split.union(*(used_by(tier, plan.world_size) for t in plan.tables
                                   for piece in t.pieces for tier in piece.tiers)))


def used_by(tier: Tier, world_size: int) -> frozenset[str]:
    """Names of `FEATURES` that one tier uses."""
    used = {tier.placement}
    if tier.placement != "replicated":
        used.add(tier.mode)
    elif len(tier.ranks) < world_size:
        used.add("per_host")
    return frozenset(used | ({"host"} if tier.memory == "host" else set()))
