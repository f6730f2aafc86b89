"""A plan's summary as text: its modelled step time by phase, rank and term."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np

from oper.messages import EXACT, MessageBits
from oper.plan import Plan, Tier
from oper.search.certificate.carried import not_certified
from oper.search.certificate.check import Verdict
from oper.search.cost.model import Evaluation, Phase, evaluate, is_ordered
from oper.search.explain.bottleneck import bottlenecks
from oper.search.problem.constraints import Constraints, violations
from oper.search.problem.machine import GROUPS, TERMS
from oper.search.problem.statement import IDS, ROWS, Problem
from oper.support.text import aligned
from oper.tables import format_bytes

KEY = "S: rows split, B: copies, P: split and sent as partial sums; x8: over 8 ranks, @3: on rank 3"
_MAX_RANKS = 16  # ranks, domains and hosts that are listed; of further ranks two are shown


def summary(plan: Plan, problem: Problem, verdict: Verdict | None = None) -> str:
    """Describe the modelled cost of `plan` on the problem's machine as text.

    Args:
        plan: the plan.
        problem: the problem.
        verdict: the result of `verify_plan`; None if the bound was not checked.

    Raises:
        PlanError: the plan is for other tables or another number of ranks.
    """
    found = evaluate(plan, problem)
    parts = [_headline(plan, problem, found, verdict), _phases(found), _ranks(found),
             _memory(found, problem), _tables(plan, problem), _constraints(plan, problem),
             _heaviest(plan, problem, found)]
    return "\n\n".join(p for p in parts if p) + "\n"


def as_json(plan: Plan, problem: Problem, verdict: Verdict | None = None) -> dict[str, Any]:
    """The figures of `summary` as values that JSON can represent; ``verified`` is None if the bound
    was not checked."""
    found = evaluate(plan, problem)
    share_rows, share_ids = replica_share(plan, problem)
    why = doubt(plan, problem, verdict)
    return {
        "topology": problem.topology.name, "source": problem.topology.source,
        "objective": problem.objective, "world_size": problem.machine.world_size,
        "batch_size": problem.batch_size, "message_bits": problem.message_bits.to_json(),
        "message_variance": _chosen_bits(plan, problem) or None,
        "step_us": found.step_us,
        "lower_bound_us": 0.0 if why else plan.lower_bound_us,
        "gap": None if why or not math.isfinite(plan.gap) else plan.gap,
        "not_certified": why or None,
        "verified": None if verdict is None else verdict.certified,
        "imbalance": found.imbalance, "fits": found.fits,
        "bottlenecks": [asdict(x) for x in bottlenecks(plan, problem)],
        "broken_constraints": violations(plan, problem.constraints),
        "replica_share_rows": share_rows, "replica_share_ids": share_ids,
        "domain_bytes": found.domain_bytes.tolist(),
        "capacity_bytes": found.capacity_bytes.tolist(),
        "host_bytes": found.host_bytes.tolist(),
        "host_capacity_bytes": found.host_capacity_bytes.tolist(),
        "phases": [{
            "name": p.name, "time_us": p.time_us, "fixed_us": p.fixed_us, "binding": p.binding,
            "hidden_us": (p.hidden * 1e6).tolist(),
            "slowest_rank": p.slowest_rank, "rank_us": (p.groups.max(axis=0) * 1e6).tolist(),
            "bytes": {t: p.units[k].tolist() for k, t in enumerate(TERMS) if t != "compute"},
        } for p in found.phases],
    }


def replica_share(plan: Plan, problem: Problem) -> tuple[float, float]:
    """Share of all rows, and share of all ids looked up, that replicated tiers have."""
    held, every = np.zeros(4), np.zeros(4)
    for t in problem.tables:
        entry = plan.table(t.spec.name)
        every += t.total
        for piece in entry.pieces:
            part = (piece.stop - piece.start) / t.spec.dim
            for tier in piece.tiers:
                if tier.placement == "replicated":
                    held += part * t.features(tier.start, tier.stop, is_ordered(t, entry))
    return float(held[ROWS] / every[ROWS]), float(held[IDS] / max(every[IDS], 1e-300))


def doubt(plan: Plan, problem: Problem, verdict: Verdict | None) -> str:
    """The reason why the plan's bound is not certified; "" if it is certified, or if it applies to
    the problem and was not checked (`verdict` is None)."""
    return not_certified(plan, problem) if verdict is None else verdict.why


def _headline(plan: Plan, problem: Problem, found: Evaluation, verdict: Verdict | None) -> str:
    topology = problem.topology
    modelled = "measured constants" if topology.source == "measured" else (
        f"modelled with {topology.source} constants")
    size = ", ".join(f"{n} {noun}{'s' * (n != 1)}" for n, noun in (
        (problem.machine.world_size, "rank"), (len(topology.domains), "memory domain"),
        (topology.num_hosts, "host")))
    tables = len(problem.tables)
    lines = [f"{problem.objective} on {topology.name}: {size} ({modelled})",
             f"batch size per rank {problem.batch_size}, {tables} table{'s' * (tables != 1)}, "
             f"{format_bytes(sum(t.spec.bytes_for(problem.training) for t in problem.tables))}",
             f"step        {found.step_us:12.1f} us"]
    bits = problem.message_bits
    if bits != EXACT:
        lines.insert(2, f"between hosts: {_bits(bits, tables)}")
    chosen = _chosen_bits(plan, problem)
    if chosen:
        lines.append(f"rounding    {chosen['used']:12.3g}      mean relative squared error, of a "
                     f"budget of {chosen['budget']:.3g}")
    why = doubt(plan, problem, verdict)
    if why:
        lines.append(f"not certified: {why}")
    else:
        gap = found.step_us / plan.lower_bound_us - 1.0
        lines += [f"lower bound {plan.lower_bound_us:12.1f} us   "
                  + ("not verified here, see oper verify" if verdict is None else
                     "verified: no plan of the searched space is faster"),
                  f"gap         {100 * gap:12.3f} %"]
        if chosen:
            lines[-2] += " (for these bits)" if verdict is None else " with these bits"
            lines.append(f"any bits    {chosen['any_bits_us']:12.1f} us   bound whatever the bits, "
                         "not verified")
    for x in _compared_groups(plan):
        lines.append(f"{x['groups']:3d} replica groups: step {x['step_us']:.1f} us, bound "
                     f"{x['bound_us']:.1f} us, with {x['synchronization_us']:.1f} us per "
                     "synchronization" + ", chosen" * (x["groups"] == plan.replica_groups))
    lines.append(f"imbalance   {found.imbalance:12.3f}     max / mean over ranks")
    return "\n".join(lines)


def _compared_groups(plan: Plan) -> list[dict[str, Any]]:
    """The plan's note of the numbers of replica groups that the planner compared; empty if there is
    none, or it has another form."""
    noted: Any = plan.notes.get("replica_groups")
    fits = isinstance(noted, list) and all(
        isinstance(x, dict) and isinstance(x.get("groups"), int) and all(
            isinstance(x.get(name), int | float)
            for name in ("step_us", "bound_us", "synchronization_us"))
        for x in noted)
    return noted if fits else []


def _chosen_bits(plan: Plan, problem: Problem) -> dict[str, float]:
    """The plan's note of how the planner chose its bits, with the variance recomputed; empty if the
    user gave them."""
    noted = plan.notes.get("message_variance")
    if not isinstance(noted, dict) or not all(
            isinstance(noted.get(name), int | float) for name in ("budget", "any_bits_us")):
        return {}
    from oper.search.variance import rounding_variance

    return {**noted, "used": rounding_variance(plan, problem)}


def _bits(bits: MessageBits, num_tables: int) -> str:
    """Bits of messages in words, with the number of tables if they differ by table."""
    if not bits.tables:
        return f"answers of {bits.answers} bits, gradients of {bits.gradients} bits"
    kinds = Counter((answers, gradients) for _, answers, gradients in bits.tables)
    kinds[32, 32] += num_tables - len(bits.tables)
    return "bits of answers / gradients: " + ", ".join(
        f"{a} / {g} of {n} table{'s' * (n != 1)}" for (a, g), n in sorted(kinds.items()) if n)


def _phases(found: Evaluation) -> str:
    hides = any(p.hidden.any() for p in found.phases)
    groups = [n for n, g in enumerate(GROUPS) if not g.startswith("rack")
              or any(p.units[TERMS.index(g)].any() for p in found.phases)]
    head = ["phase", "us", "slowest", "limited by", *(f"{GROUPS[n]} us" for n in groups),
            "fixed us", *(["overlapped us"] if hides else [])]
    rows = []
    for p in found.phases:
        rank = p.slowest_rank
        rows.append([p.name, f"{p.time_us:.1f}", f"rank {rank}", p.binding,
                     *(f"{1e6 * x:.1f}" for x in p.groups[groups, rank]), f"{p.fixed_us:.1f}",
                     *([f"{1e6 * p.hidden[rank]:.1f}"] if hides else [])])
    return "phases (terms of the slowest rank)\n" + _aligned(head, rows)


def _ranks(found: Evaluation) -> str:
    """Per rank and phase: microseconds by term."""
    world = found.held_bytes.size
    blocks = []
    for p in found.phases:
        terms = [k for k in range(len(TERMS)) if p.seconds[k].max() > 0]
        if not terms:  # the request phase, if no rows are pushed
            continue
        head = ["rank", "total us", *(f"{TERMS[k]} us" for k in terms),
                *(f"{TERMS[k]} bytes" for k in terms if TERMS[k] != "compute")]
        rows = [_rank_row(p, terms, r) for r in range(min(world, _MAX_RANKS))]
        if world > _MAX_RANKS:
            level = p.groups.max(axis=0)
            for word, rank in (("least", level.argmin()), ("most", level.argmax())):
                rows.append([f"{word}: {rank}", *_rank_row(p, terms, int(rank))[1:]])
        blocks.append(f"{p.name}, per rank\n" + _aligned(head, rows))
    return "\n\n".join(blocks)


def _rank_row(p: Phase, terms: list[int], r: int) -> list[str]:
    return [str(r), f"{1e6 * p.groups[:, r].max():.1f}",
            *(f"{1e6 * p.seconds[k, r]:.1f}" for k in terms),
            *(format_bytes(p.units[k, r]) for k in terms if TERMS[k] != "compute")]


def _memory(found: Evaluation, problem: Problem) -> str:
    domains = problem.topology.domains
    rows = []
    for k, d in enumerate(domains[:_MAX_RANKS]):
        need, have = float(found.domain_bytes[k]), float(found.capacity_bytes[k])
        name = str(d.ranks[0]) if len(d.ranks) == 1 else f"{d.ranks[0]}-{d.ranks[-1]}"
        rows.append([str(k), name, format_bytes(need), format_bytes(have),
                     f"{100 * need / max(have, 1.0):.1f} %"])
    for k, (need, have) in enumerate(zip(found.host_bytes, found.host_capacity_bytes, strict=True)):
        if have > 0 and k < _MAX_RANKS:
            rows.append([f"host {k}", "", format_bytes(need), format_bytes(have),
                         f"{100 * need / have:.1f} %"])
    tail = "" if len(domains) <= _MAX_RANKS else f"\n({len(domains) - _MAX_RANKS} more domains)"
    return "memory\n" + _aligned(["domain", "ranks", "need", "capacity", "used"], rows) + tail


def _tables(plan: Plan, problem: Problem) -> str:
    share_rows, share_ids = replica_share(plan, problem)
    kinds = Counter(_kind(tier, plan.world_size) for entry in plan.tables
                    for piece in entry.pieces for tier in piece.tiers)
    text = ", ".join(f"{n} {k}" for k, n in sorted(kinds.items()))
    return (f"tiers: {text}\n{KEY}\nreplicas: {100 * share_rows:.2f} % of the rows, "
            f"{100 * share_ids:.2f} % of the lookups")


def _kind(tier: Tier, world_size: int) -> str:
    how = "" if tier.placement == "replicated" else f" {tier.mode}"
    per_host = " per host" * (tier.placement == "replicated" and len(tier.ranks) < world_size)
    memory = " in host memory" * (tier.memory == "host")
    return f"{tier.placement}{how}{per_host} ({tier.notation()}){memory}"


def _heaviest(plan: Plan, problem: Problem, found: Evaluation) -> str:
    """The tiers with the largest loads on the slowest rank of the longest phase, and the time that
    moving each of them saves."""
    phase = max(found.phases, key=lambda p: p.time_us)
    rows = []
    for x in bottlenecks(plan, problem):
        columns = f"[{x.columns[0]}:{x.columns[1]}] " if x.is_cut else ""
        saves = f"{x.saves_us:.1f} us as {x.move}" if x.move else "nothing: no better place"
        rows.append([x.table, f"{columns}{x.rows[0]}:{x.rows[1]}", x.tier, f"{x.load_us:.1f}",
                     saves])
    head = ["table", "rows", "placed", f"{phase.binding} us", "time saved by moving it alone"]
    title = (f"bottleneck: the {phase.binding} time of rank {phase.slowest_rank} in {phase.name}, "
             "the longest phase\n")
    return title + _aligned(head, rows, left=(0, 1, 2, 4))


def _constraints(plan: Plan, problem: Problem) -> str:
    """The names of the plan's constraints, and a line for each that it violates."""
    held = problem.constraints
    if held == Constraints():
        return ""
    broken = violations(plan, held)
    names = ", ".join(held.to_json())
    if not broken:
        return f"constraints: all satisfied ({names})"
    return f"constraints: {len(broken)} violated ({names})\n" + "\n".join(
        f"  {line}" for line in broken)


def _aligned(head: list[str], rows: list[list[str]], left: tuple[int, ...] = (0,)) -> str:
    """Format a table as indented text; the columns `left` are aligned left, others right."""
    return "\n".join(f"  {line}" for line in aligned([head, *rows], left))
