"""A page on the drift of accesses from a plan's statistics, and on whether a new plan pays off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oper.analysis import distance
from oper.errors import InvalidInputError
from oper.plan import Plan
from oper.replanning import Replanning, replan, step_us
from oper.report.figures import MAX_CURVES, curves, short
from oper.report.page import Plot, Table, render
from oper.search.verbs import as_planned
from oper.stats import AccessStats
from oper.tables import format_bytes
from oper.topology import Topology


@dataclass(frozen=True, slots=True)
class Drift:
    """A comparison of later access statistics with earlier ones.

    Attributes:
        name: name of the later statistics.
        distances: total variation distance by table, 0 to 1.
        replanning: costs and savings of a new plan; None if no plan was given.
    """

    name: str
    distances: dict[str, float]
    replanning: Replanning | None

    @property
    def mean(self) -> float:
        """Mean distance over tables."""
        return float(np.mean(list(self.distances.values()))) if self.distances else 0.0


def drifts(old: AccessStats, later: Sequence[tuple[str, AccessStats]],
           planned: tuple[Plan, Topology] | None = None, copy_gbps: float = 1.0) -> list[Drift]:
    """Compare statistics with later ones and, on each of these, the plan in use with a new plan.

    Args:
        old: the statistics that the plan was made from.
        later: names and statistics, in time order.
        planned: the plan in use and its machine; None = compute distances only. The new plan may
            use what the plan in use may, and satisfies the same constraints.
        copy_gbps: rate at which a rank copies rows into a new arena, in GB/s.

    Raises:
        InvalidInputError: statistics are for other tables or vocabularies, or have a table without
            accesses.
        PlanError: the plan is for other tables or ranks.
    """
    found = []
    for name, stats in later:
        if stats.tables.keys() != old.tables.keys():
            raise InvalidInputError("cannot compare statistics", "tables",
                                    sorted(stats.tables.keys() ^ old.tables.keys())[:8],
                                    "the same tables in both", "count the same tables")
        old.check_same_rows("cannot compare statistics", stats)
        distances = {n: distance(t, stats.tables[n]) for n, t in old.tables.items()}
        change = None
        if planned is not None:
            plan, topology = planned
            change = replan(plan, as_planned(stats, plan.notes), topology, copy_gbps=copy_gbps,
                            options={"allow": plan.notes.get("allow")})
        found.append(Drift(name, distances, change))
    return found


def verdict(drift: Drift) -> str:
    """Summarize a drift in a line: mean distance and, with a plan, whether a new plan pays off."""
    text = f"{drift.name}: mean distance {drift.mean:.3f}"
    change = drift.replanning
    if change is None:
        return text
    gain = _saved(change)
    text += (f"; a step takes {change.old_step_us:,.1f} us with this plan, "
             f"{change.new_step_us:,.1f} us with another (modelled)")
    if gain <= 0:
        return f"{text}: keep the plan"
    return (f"{text}: another plan saves {gain:.1f} % and pays off after "
            f"{change.break_even_steps:,.0f} steps")


def drift_page(old: AccessStats, found: Sequence[Drift],
               planned: tuple[Plan, Topology] | None = None) -> str:
    """Return an HTML page on the result of `drifts`."""
    names = sorted(old.tables, key=lambda n: -old.tables[n].num_accesses)
    distances = [(short(name), range(len(found)), [d.distances[name] for d in found])
                 for name in names[:MAX_CURVES]]
    blocks: list[Plot | Table] = [
        Plot("Drift of lookups", "Total variation distance from the old statistics: 0 = equal, 1 = "
             "disjoint; rare ids add noise. Shown for the tables with the most lookups.",
             curves("distances", distances, ("", "distance from the old statistics"), top=1.02,
                    ticks=[d.name for d in found]))]
    tiles = [("tables", f"{len(old.tables):,}"), ("later statistics", f"{len(found):,}"),
             ("mean distance of the last", f"{found[-1].mean:.3f}" if found else "-")]
    if planned is not None and found:
        blocks += _costs(old, found, *planned)
        last = found[-1].replanning
        if last is not None:
            tiles += [("another plan saves", f"{_saved(last):.1f} %"),
                      ("another plan pays off after", _steps(last))]
    rows = [[n, f"{old.tables[n].num_rows:,}", f"{old.tables[n].num_accesses:,}",
             *(f"{d.distances[n]:.3f}" for d in found)] for n in names]
    blocks.append(Table("Distance by table", ["table", "rows", "lookups, old",
                                              *(d.name for d in found)], rows))
    return render("Drift of access statistics", f"From: {old.source or 'statistics'}.", tiles,
                  blocks)


def _saved(change: Replanning) -> float:
    """Return the percentage of a step that a new plan saves; 0 if it rounds to 0.0 or -0.0."""
    found = 100 * (1 - change.new_step_us / change.old_step_us)
    return found if abs(found) >= 0.05 else 0.0


def _steps(change: Replanning) -> str:
    steps = change.break_even_steps
    return f"{steps:,.0f} steps" if np.isfinite(steps) and _saved(change) > 0 else "never"


def _costs(old: AccessStats, found: Sequence[Drift], plan: Plan, topology: Topology
           ) -> list[Plot | Table]:
    start = step_us(plan, as_planned(old, plan.notes), topology)
    changes = [(d.name, d.replanning) for d in found if d.replanning is not None]
    rows = [[name, f"{c.old_step_us:,.1f}", f"{c.new_step_us:,.1f}", f"{_saved(c):.1f} %",
             format_bytes(c.moved_bytes), f"{c.copy_us / 1e3:,.1f}", _steps(c)]
            for name, c in changes]
    note = (f"Modelled for the topology {topology.name!r}. A step of the plan takes "
            f"{start:,.1f} us on the statistics that it was made from. A change of plan copies all "
            "rows into new arenas: it pays off once the time saved in all steps equals the time of "
            "the copy.")
    return [Plot("Cost of the old plan", "A training or inference step, modelled on each of the "
                 "later statistics: with the plan in use, and with a plan made from them.",
                 _cost_curve(start, changes)),
            Table("When another plan pays off", [
                "statistics", "this plan, us", "another, us", "saves", "rows that move", "copy, ms",
                "pays off after"], rows, note)]


def _cost_curve(start: float, changes: Sequence[tuple[str, Replanning]]) -> str:
    of = {"the plan in use": [start, *(c.old_step_us for _, c in changes)],
          "a plan made from them": [start, *(c.new_step_us for _, c in changes)]}
    return curves("costs", [(label, range(len(y)), y) for label, y in of.items()],
                  ("", "microseconds a step"), top=1.1 * max(map(max, of.values())),
                  ticks=["old", *(name for name, _ in changes)])
