"""A page about one plan: loads, coverage, placement, and every figure of the text summary."""

from __future__ import annotations

from oper.plan import Plan
from oper.report import figures
from oper.report.page import Plot, Table, Text, render
from oper.search.certificate.check import Verdict, verify_plan
from oper.search.cost.model import Evaluation, evaluate
from oper.search.explain.bottleneck import bottlenecks
from oper.search.explain.summary import KEY, doubt, replica_share, summary
from oper.search.peers.baselines import peers
from oper.search.problem.machine import TERMS
from oper.search.problem.statement import Problem
from oper.tables import format_bytes

_COMPARED = "largest-first-lookups"
_LINKS = {"memory": "own memory", "link_in": "in, within the host",
          "link_out": "out, within the host", "cross_in": "in, between hosts",
          "cross_out": "out, between hosts", "host_memory": "host memory",
          "rack_in": "in, between racks", "rack_out": "out, between racks"}


def page(plan: Plan, problem: Problem) -> str:
    """Return a self-contained HTML page about a plan.

    Raises:
        MissingDependencyError: matplotlib or jinja2 is not installed.
        PlanError: the plan is for other tables or another number of ranks.
    """
    found = evaluate(plan, problem)
    before, verdict = _whole_tables(problem), verify_plan(plan, problem)
    topology = problem.topology
    about = (f"{len(problem.tables)} tables, "
             f"{format_bytes(sum(t.spec.bytes_for(problem.training) for t in problem.tables))}, "
             f"{problem.machine.world_size} ranks, {problem.batch_size:,} samples per rank; "
             f"times are modelled with {topology.source} constants.")
    return render(f"Plan for {topology.name}, {problem.objective}", about,
                  _tiles(plan, problem, found, before, verdict), [
        _bottlenecks(plan, problem, found), *_plots(plan, problem, found, before),
        _bytes(found), Text("All figures", summary(plan, problem, verdict))])


def _bottlenecks(plan: Plan, problem: Problem, found: Evaluation) -> Table:
    rows = [[b.table, f"{b.rows[0]}:{b.rows[1]}" + (
        f" [{b.columns[0]}:{b.columns[1]}]" if b.is_cut else ""), b.tier, f"{b.load_us:.1f}",
        f"{b.saves_us:.1f}", b.move or "no better place"] for b in bottlenecks(plan, problem)]
    return Table("Bottleneck", ["table", "rows", "placed", "load, us", "saves, us",
                                "when placed as"], rows, _binding(found),
                 f"{KEY}.")


def _bytes(found: Evaluation) -> Table:
    """Tabulate modelled bytes by phase and link, of all ranks and of the busiest rank."""
    rows = []
    for phase in found.phases:
        for k, term in enumerate(TERMS):
            if term != "compute" and phase.units[k].max() > 0:
                rows.append([phase.name, _LINKS[term], format_bytes(round(phase.units[k].sum())),
                             format_bytes(round(phase.units[k].max())),
                             f"{phase.seconds[k].max() * 1e6:.1f}"])
    return Table("Bytes by link", ["phase", "link", "all ranks", "busiest rank", "us on it"], rows,
                 "Modelled, of one step.")


def _binding(found: Evaluation) -> str:
    phase = max(found.phases, key=lambda p: p.time_us)
    share = 100 * phase.time_us / max(found.step_us, 1e-300)  # 0 if dense compute hides it
    return (f"{phase.name.capitalize()} takes {share:.0f} % of the step; its slowest rank is "
            f"{phase.slowest_rank}, limited by {phase.binding.replace('_', ' ')}. The "
            "tiers that load it most, and how much shorter the step would be if one were moved:")


def _whole_tables(problem: Problem) -> Evaluation | None:
    """Evaluate a plan with undivided tables, assigned to ranks in descending order of lookups."""
    plan = peers()[_COMPARED](problem, 0)
    return None if plan is None else evaluate(plan, problem)


def _tiles(plan: Plan, problem: Problem, found: Evaluation, before: Evaluation | None,
           verdict: Verdict) -> list[tuple[str, str]]:
    share_rows, share_ids = replica_share(plan, problem)
    full = found.fullest
    tiles = [("step", f"{found.step_us:,.1f} us")]
    why = doubt(plan, problem, verdict)
    if why:
        tiles.append(("not certified", why))
    else:
        tiles += [("lower bound, verified", f"{plan.lower_bound_us:,.1f} us"),
                  ("gap", f"{100 * (found.step_us / plan.lower_bound_us - 1):.2f} %")]
    if before is not None:
        tiles.append(("whole tables instead", f"{before.step_us:,.1f} us"))
    return [*tiles, ("imbalance", f"{found.imbalance:.3f}"),
            ("fullest memory", f"{100 * full:.1f} %"),
            ("rows replicated", f"{100 * share_rows:.2f} %"),
            ("lookups of replicated rows", f"{100 * share_ids:.1f} %")]


def _plots(plan: Plan, problem: Problem, found: Evaluation, before: Evaluation | None
           ) -> list[Plot]:
    mapped = min(len(problem.tables), figures.MAX_MAPPED)
    phases = {p.name: p.time_us for p in found.phases}
    bars = [("this plan", phases)]
    if before is not None:
        bars.append(("whole tables", {p.name: p.time_us for p in before.phases}))
    return [
        Plot("A step, phase by phase", "Modelled times; a phase ends when its slowest rank does.",
             figures.stacked(bars, "microseconds", "phases")),
        Plot("Load of every rank", "Memory and compute of a rank add up; its links work "
             "in parallel. Marks: the same phase if whole tables are assigned to ranks, those with "
             "most lookups first.",
             figures.loads(found, before)),
        Plot("Where rows are stored", f"The {mapped} tables with the most lookups. Replicated rows "
             "are read locally by every rank, a copy per host by all ranks of its host; striped "
             "rows are distributed over ranks; owned rows are stored on one rank, whose number is "
             "shown.", figures.placement_map(plan, problem)),
        Plot("How much the hottest rows cover", "Share of a table's lookups that go to its hottest "
             "rows; without statistics, all rows count as equally hot.", figures.coverage(problem)),
    ]
