"""One page about one plan: loads, coverage, placement, and every figure of the text summary."""

from __future__ import annotations

import os
from typing import Any

from oper.errors import MissingDependencyError, fail
from oper.files import write_text
from oper.plan import Plan
from oper.report import figures
from oper.search.baselines import peers
from oper.search.bottleneck import bottlenecks
from oper.search.cost import Evaluation, evaluate
from oper.search.explain import KEY, replica_share, summary
from oper.search.problem import Problem
from oper.tables import format_bytes

_COMPARED = "largest-first-lookups"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --text: #1d2126; --soft: #5c6570; --line: #d6dade; --back: #fff; --panel: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ec; --soft: #9ba5af; --line: #3a424a; --back: #15181b; --panel: #1e2327; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
       max-width: 70rem; margin: 1.5rem auto 4rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.6rem, 1fr)); gap: 0.6rem; }
dl div { border: 1px solid var(--line); border-radius: 6px; padding: 0.5rem 0.7rem; }
dt { color: var(--soft); font-size: 0.8rem; } dd { margin: 0; font-size: 1.2rem; }
figure { margin: 0.5rem 0; } figcaption, .note { color: var(--soft); font-size: 0.9rem; }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; }
.wide svg { display: block; width: auto; height: auto; max-width: 100%; min-width: 40rem; }
svg text { fill: var(--text) !important; }
svg [id^="inside"] text { fill: #111 !important; }
svg [style*="stroke: #000000"] { stroke: var(--soft) !important; }
svg [style*="fill: #000000"] { fill: var(--text) !important; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; }
th, td { text-align: left; padding: 0.35rem 0.8rem 0.35rem 0; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th { color: var(--soft); font-weight: normal; }
.number { text-align: right; padding-right: 1.6rem; font-variant-numeric: tabular-nums; }
pre { overflow-x: auto; background: var(--panel); padding: 1rem; border-radius: 6px;
      font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="note">{{ about }}</p>
<dl>
{% for name, value in tiles %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}</dl>
<h2>What binds</h2>
<p class="note">{{ binding }}</p>
<div class="wide"><table>
<tr><th>table</th><th>rows</th><th>placed</th><th class="number">load, us</th>\
<th class="number">saves, us</th><th>when placed as</th></tr>
{% for b in bottlenecks %}<tr><td>{{ b.table }}</td>\
<td>{{ b.rows[0] }}:{{ b.rows[1] }}{{ " [%d:%d]"|format(*b.columns) if b.is_cut }}</td>\
<td>{{ b.tier }}</td><td class="number">{{ "%.1f"|format(b.load_us) }}</td>\
<td class="number">{{ "%.1f"|format(b.saves_us) }}</td>\
<td>{{ b.move or "no better place" }}</td></tr>
{% endfor %}</table></div>
<p class="note">{{ key }}, x8: over 8 ranks.</p>
{% for heading, caption, svg in plots %}<h2>{{ heading }}</h2>
<figure><div class="wide">{{ svg|safe }}</div><figcaption>{{ caption }}</figcaption></figure>
{% endfor %}<h2>All figures</h2>
<pre>{{ text }}</pre>
</body>
</html>
"""


def write_page(path: str | os.PathLike[str], plan: Plan, problem: Problem) -> None:
    """Write the page of a plan, one HTML file that refers to no other.

    Raises:
        MissingDependencyError: matplotlib or jinja2 is not installed.
        PlanError: the plan is for other tables or another number of ranks.
    """
    write_text(path, page(plan, problem))


def page(plan: Plan, problem: Problem) -> str:
    """The page of `write_page` as text."""
    try:
        import jinja2
    except ImportError:
        raise MissingDependencyError(fail("cannot write a page", "jinja2", None, "installed",
                                          "pip install 'oper[report]'")) from None
    found = evaluate(plan, problem)
    before = _whole_tables(problem)
    topology = problem.topology
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    text: str = template.render(
        title=f"Plan for {topology.name}, {problem.objective}", text=summary(plan, problem),
        about=f"{len(problem.tables)} tables, "
              f"{format_bytes(sum(t.spec.num_bytes for t in problem.tables))}, "
              f"{problem.machine.world_size} ranks, {problem.batch_size:,} samples per rank; "
              f"times are modelled with {topology.source} constants.",
        binding=_binding(found), bottlenecks=bottlenecks(plan, problem), key=KEY,
        tiles=_tiles(plan, problem, found, before), plots=_plots(plan, problem, found, before))
    return text


def _binding(found: Evaluation) -> str:
    phase = max(found.phases, key=lambda p: p.time_us)
    share = 100 * phase.time_us / found.step_us
    return (f"{phase.name.capitalize()} takes {share:.0f} % of the step; it ends with rank "
            f"{phase.slowest_rank}, whose {phase.binding.replace('_', ' ')} is the longest. The "
            "tiers that load it most, and what moving one of them alone would save of the step:")


def _whole_tables(problem: Problem) -> Evaluation | None:
    """What the same tables cost when placed whole, largest number of lookups first."""
    plan = peers()[_COMPARED](problem, 0)
    return None if plan is None else evaluate(plan, problem)


def _tiles(plan: Plan, problem: Problem, found: Evaluation, before: Evaluation | None
           ) -> list[tuple[str, str]]:
    share_rows, share_ids = replica_share(plan, problem)
    full = float((found.domain_bytes / found.capacity_bytes).max())
    tiles = [("step", f"{found.step_us:,.1f} us")]
    if plan.lower_bound_us > 0:
        tiles += [("lower bound", f"{plan.lower_bound_us:,.1f} us"),
                  ("gap", f"{100 * (found.step_us / plan.lower_bound_us - 1):.2f} %")]
    if before is not None:
        tiles.append(("whole tables instead", f"{before.step_us:,.1f} us"))
    return [*tiles, ("imbalance", f"{found.imbalance:.3f}"),
            ("fullest memory", f"{100 * full:.1f} %"),
            ("rows replicated", f"{100 * share_rows:.2f} %"),
            ("lookups that meet them", f"{100 * share_ids:.1f} %")]


def _plots(plan: Plan, problem: Problem, found: Evaluation, before: Evaluation | None
           ) -> list[tuple[str, str, Any]]:
    mapped = min(len(problem.tables), figures.MAX_MAPPED)
    return [
        ("Load of every rank", "Memory and compute of a rank add up; its links run beside them. "
         "Marks: the same phase with whole tables, largest number of lookups first.",
         figures.loads(found, before)),
        ("Where the rows live", f"The {mapped} tables with the most lookups. Replicated rows are "
         "read locally by every rank, striped rows are dealt over ranks, owned rows live on one.",
         figures.placement_map(plan, problem)),
        ("How much the hottest rows cover", "Without statistics all rows count as equally hot.",
         figures.coverage(problem)),
    ]
