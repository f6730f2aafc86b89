"""What a planner may use: placements, exchange modes and column splits."""

from __future__ import annotations

from collections.abc import Iterable

from oper.errors import InvalidInputError, fail
from oper.plan import PLACEMENTS, Plan
from oper.topology import Topology

FEATURES = frozenset({*PLACEMENTS, "pull", "push", "columns"})
#: The default of `make_plan`. The host runtime executes pushed tiers and column pieces as well, but
#: among ranks that share a memory they never pay.
EXECUTABLE = frozenset({"replicated", "striped", "owned", "pull"})
#: What pays where ranks share no memory: partial sums instead of rows over the network.
ACROSS_DOMAINS = EXECUTABLE | {"push"}
#: The whole space that the search knows.
EVERYTHING = FEATURES


def executed_space(topology: Topology) -> frozenset[str]:
    """What `oper.shard` lets a plan for the ranks of `topology` use."""
    return EXECUTABLE if len(topology.domains) == 1 else ACROSS_DOMAINS


def check_allow(allow: Iterable[str]) -> frozenset[str]:
    """`allow` as a set; raises InvalidInputError unless a placement and a mode are in it."""
    chosen = frozenset(allow)
    known = chosen <= FEATURES
    if not known or not chosen & set(PLACEMENTS) or not chosen & {"pull", "push"}:
        raise InvalidInputError(
            fail("invalid search space", "allow", sorted(chosen),
                 f"some of {sorted(FEATURES)} with at least one placement and one exchange mode",
                 "name what the plan may use"))
    return chosen


def used_features(plan: Plan) -> frozenset[str]:
    """Names of `FEATURES` that a plan uses; the mode of replicated tiers does not count."""
    tiers = [tier for t in plan.tables for piece in t.pieces for tier in piece.tiers]
    split = {"columns"} if any(len(t.pieces) > 1 for t in plan.tables) else set()
    return frozenset(split | {t.placement for t in tiers}
                     | {t.mode for t in tiers if t.placement != "replicated"})
