"""``oper plan``, ``oper verify`` and ``oper explain``."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from oper.errors import InvalidInputError, UsageError, fail, require
from oper.messages import EXACT, MessageBits
from oper.plan import Plan
from oper.rows.capacity import DynamicRows, stats_of_rows
from oper.search.plan_flags import (
    DEFAULT_BATCH,
    NO_DENSE,
    add_machine,
    add_overlap,
    allowed,
    configure_plan as configure_plan,
)
from oper.search.problem.overlap import overlap_to_json, parse_argument
from oper.search.problem.presets import THIS_HOST, is_preset, topology_preset
from oper.search.problem.space import check_allow, used_features
from oper.search.problem.statement import Problem, make_problem, with_overlap
from oper.search.replica_groups import plan_groups
from oper.stats import AccessStats
from oper.support.files import check_target, read_json
from oper.support.flags import KEY_RULES, name_values, text_for, whole
from oper.tables import CODE_BITS, KEY_EVICTIONS, TableSpec, format_bytes
from oper.topology import Topology

_DYNAMIC = "dynamic"  # a plan's note, see `_dynamic`
_SHARED = "samples_per_bag"  # a plan's note: `AccessStats.samples_per_bag`

#: Options of ``oper plan`` that a plan for a latency bound does not use, and their defaults.
_UNUSED_FOR_LATENCY: dict[str, Any] = {
    "batch_size": DEFAULT_BATCH, "overlap": [], "message_variance": None,
    "synchronize_every": None, "synchronize_delay": 0, "synchronize_bits": 32, "allow": None,
    "effort": "fast", "time_budget": None, "target_gap": 0.01, "seed": 0, "start": None}


def run_plan(args: argparse.Namespace) -> int:
    """Make a plan, write it to a file and print its modelled cost; returns the exit code."""
    from oper.search.explain.summary import as_json, summary
    from oper.search.planner import plan_problem

    has_bound = args.request_rate is not None or args.latency_bound is not None
    if has_bound:
        _check_latency_options(args)
    elif args.dense_us != NO_DENSE:
        raise UsageError("cannot plan", "--dense-us", args.dense_us,
                         "no value without --latency-bound",
                         "add --latency-bound and --request-rate, or state dense compute that "
                         "hides a phase with --overlap")
    check_target(args.output)
    stats = AccessStats.load(args.stats)
    # Stored in the plan, so that other commands adapt their statistics in the same way.
    notes = {_DYNAMIC: _dynamic(args, stats), _SHARED: _shared(args, stats)}
    notes = {name: x for name, x in notes.items() if x}
    stats = as_planned(stats, notes)
    if has_bound:
        return _plan_latency(args, stats, notes)
    topology = _machine(args)

    def problem_on(machine: Topology) -> Problem:
        problem = make_problem(
            _tables(args, stats), stats, machine, objective=args.objective,
            batch_size=args.batch_size, allow=allowed(args.allow),
            constraints=None if args.constraints is None else read_constraints(args.constraints))
        return replace(with_overlap(problem, parse_argument(args.overlap)),
                       message_bits=_message_bits(args))

    def plan_on(machine: Topology, share: float = 1.0) -> Plan:
        seconds = None if args.time_budget is None else args.time_budget * share
        return plan_problem(problem_on(machine), effort=args.effort, time_budget_s=seconds,
                            target_gap=args.target_gap, seed=args.seed,
                            start=None if args.start is None else Plan.load(args.start),
                            message_variance=args.message_variance)

    if args.synchronize_every is None:
        given = args.synchronize_delay, args.synchronize_bits
        if given != (0, 32):
            raise UsageError("cannot plan replica groups", "--synchronize-delay, "
                             "--synchronize-bits", given,
                             "(0, 32), their defaults, without --synchronize-every",
                             "pass --synchronize-every as well")
        plan = plan_on(topology)
    elif args.objective != "training" or args.start is not None:
        raise UsageError("cannot plan replica groups", "--objective, --start",
                         (args.objective, args.start), "training, and no start",
                         "leave out --synchronize-every")
    else:
        plan = plan_groups(topology, (args.synchronize_every, args.synchronize_delay),
                           args.synchronize_bits, stats, plan_on)
    problem = replace(problem_on(topology.divided(plan.replica_groups)),
                      message_bits=plan.message_bits)
    plan = replace(plan, notes=plan.notes | notes)
    plan.save(args.output)
    if args.json:
        print(json.dumps({"plan": args.output, **as_json(plan, problem)}))
    else:
        print(summary(plan, problem), end="")
    print(f"wrote {args.output}", file=sys.stderr)
    return 0


def _machine(args: argparse.Namespace) -> Topology:
    """The topology of ``oper plan``; warns if other commands would take its name for another."""
    topology = topology_preset(args.topology, args.world_size)
    if args.topology not in (THIS_HOST, topology.name) and is_preset(topology.name):
        warnings.warn(fail(f"the machine in {args.topology!r} has the name of a preset", "name",
                           topology.name, "another name, since commands that read the plan use the "
                           "preset", "rename it, or pass --topology to them as well"), stacklevel=2)
    return topology


def _check_latency_options(args: argparse.Namespace) -> None:
    """Raise UsageError unless the options of ``oper plan`` suit a latency bound."""
    if None in (args.request_rate, args.latency_bound) or args.objective != "inference":
        raise UsageError("cannot plan for a latency bound",
                         "--request-rate, --latency-bound, --objective",
                         (args.request_rate, args.latency_bound, args.objective),
                         "a rate and a bound > 0, and inference", "pass all three")
    for name, default in _UNUSED_FOR_LATENCY.items():
        if getattr(args, name) != default:
            raise UsageError("cannot plan for a latency bound", f"--{name.replace('_', '-')}",
                             getattr(args, name), "no value: with --latency-bound the plan with "
                             "the least memory is chosen", "leave the option out")


def _plan_latency(args: argparse.Namespace, stats: AccessStats, notes: dict[str, Any]) -> int:
    """Run ``oper plan`` with a latency bound."""
    from oper.search.explain.latency import LatencyGoal, plan_latency

    try:
        fixed, per_sample = (float(x) for x in args.dense_us.split(","))
    except ValueError:
        raise UsageError("cannot plan for a latency bound", "--dense-us", args.dense_us,
                         "two numbers separated by a comma",
                         "pass FIXED,PER_SAMPLE in microseconds, e.g. 200,1.5") from None
    constraints = None if args.constraints is None else read_constraints(args.constraints)
    plan, serving = plan_latency(
        _tables(args, stats), stats, _machine(args),
        LatencyGoal(args.request_rate, args.latency_bound, (fixed, per_sample)), constraints,
        _message_bits(args))
    plan = replace(plan, notes=plan.notes | notes)
    plan.save(args.output)
    if args.json:
        print(json.dumps({"plan": args.output, **plan.notes["latency"]}))
    else:
        print(f"batches of up to {serving.max_batch} samples, waiting up to "
              f"{serving.max_wait_ms:g} ms for others\n"
              f"modelled: p99 {serving.p99_ms:.3g} ms (bound {args.latency_bound:g} ms), "
              f"mean batch {serving.mean_batch:.1f}, ranks busy {serving.utilisation:.0%}\n"
              f"memory {format_bytes(serving.memory_bytes)}, including replicas of "
              f"{serving.replica_share:.0%} of the tables")
    print(f"wrote {args.output}", file=sys.stderr)
    return 0


def configure_explain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``oper explain``, except those of its HTML page."""
    parser.add_argument("plan", metavar="PLAN", help="plan written by 'oper plan' or by hand")
    parser.add_argument("--stats", metavar="STATS", help="statistics to evaluate the plan with "
                                                 "(default: all rows of a table equally hot)")
    add_overlap(parser)
    add_machine(parser, "default: the plan's own")
    parser.add_argument("--batch-size", type=whole(1), metavar="N",
                        help="samples per rank and step (default: the plan's own)")
    parser.add_argument("--diff", metavar="OTHER", help="compare with another plan of the same "
                                                        "tables")
    parser.add_argument("--what-if", action="append", type=text_for(_change), default=[],
                        metavar="CHANGE",
                        help="evaluate this plan and a new plan after a change of memory, link, "
                             "cross (between hosts), uplink (of racks), read, host-memory, "
                             "host-link or batch, e.g. memory=+10%% or link=x2; may be repeated")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def explain(args: argparse.Namespace) -> tuple[Plan, Problem]:
    """Print the modelled cost of a plan; returns the plan, with its bound, and its problem."""
    from oper.search.certificate.check import verify_plan
    from oper.search.explain import diff as plan_diff, what_if
    from oper.search.explain.summary import as_json, summary

    changes = [what_if.parse_change(text) for text in args.what_if]
    if changes and args.diff is not None:
        raise UsageError("cannot explain the plan", "--diff, --what-if", (args.diff, args.what_if),
                         "one of the two", "call 'oper explain' once for each")
    plan, problem = _explained(args)
    compared = None
    if args.diff is not None:
        other = Plan.load(args.diff)
        check_order(args.diff, other, problem, _stats(args))
        found = plan_diff.diff(plan, other, problem)
        print(json.dumps({"plan": args.plan, "other": args.diff, **found}) if args.json
              else plan_diff.as_text(found, (args.plan, args.diff)).rstrip("\n"))
        return plan, problem
    if changes:
        topology, batch_size = what_if.changed_problem(problem.topology, problem.batch_size,
                                                       changes)
        stats = _stats(args)
        stats = None if stats is None else as_planned(stats, plan.notes)
        after = make_problem([t.table for t in plan.tables], stats, topology,
                             objective=plan.objective, allow=problem.allow, batch_size=batch_size,
                             constraints=problem.constraints)
        compared = what_if.compare(plan, problem, replace(
            with_overlap(after, overlap_to_json(problem.overlap)),
            fallback=problem.fallback, message_bits=problem.message_bits))
    if args.json:
        value = {"plan": args.plan, **as_json(plan, problem, verify_plan(plan, problem))}
        if compared is not None:
            value["what_if"] = {"changes": args.what_if, **compared}
        print(json.dumps(value))
    elif compared is not None:
        print(what_if.as_text(changes, compared), end="")
    else:
        print(summary(plan, problem, verify_plan(plan, problem)), end="")
    return plan, problem


def configure_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``oper verify``."""
    parser.add_argument("plan", metavar="PLAN", help="plan written by 'oper plan'")
    parser.add_argument("--stats", metavar="STATS", required=True,
                        help="the statistics that the plan was made from")
    add_overlap(parser)
    add_machine(parser, "default: the plan's own")
    parser.add_argument("--batch-size", type=whole(1), metavar="N",
                        help="samples per rank and step (default: the plan's own)")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def run_verify(args: argparse.Namespace) -> int:
    """Check the proof of a plan's lower bound; returns 0 if it holds, else 1."""
    from oper.search.certificate.check import verify_plan

    plan, problem = stated(args, _stats(args))
    found = verify_plan(plan, problem)
    if args.json:
        value = {"step_us": found.step_us, "bound_us": found.bound_us,
                 "cutoff_us": found.cutoff_us, "gap": found.gap}
        print(json.dumps({
            "plan": args.plan, "certified": found.certified, "why": found.why or None,
            **{k: x if math.isfinite(x) else None for k, x in value.items()},
            "leaves": found.num_leaves}))
        return 0 if found.certified else 1
    print(f"step        {found.step_us:12.1f} us   evaluated again")
    if math.isfinite(found.bound_us):
        print(f"bound       {found.bound_us:12.1f} us   the lowest over {found.num_leaves} "
              f"{'leaves' if found.num_leaves != 1 else 'leaf'} of the search tree, recomputed")
    if math.isfinite(found.cutoff_us):
        print(f"cutoff      {found.cutoff_us:12.1f} us   the bound covers all faster plans")
    if found.certified:
        print(f"gap         {100 * found.gap:12.3f} %\n"
              "verified: no plan of the searched space is faster than "
              f"{found.lower_bound_us:.1f} us")
    else:
        print(f"not certified: {found.why}")
    return 0 if found.certified else 1


def _explained(args: argparse.Namespace) -> tuple[Plan, Problem]:
    """Return the plan and the problem that the arguments of ``oper explain`` describe.

    The returned plan has a lower bound for this problem: the one in the plan file if it was made
    for the same problem, otherwise a new one."""
    from oper.search.certificate.carried import is_for, proof_of, with_bound
    from oper.search.cost.model import evaluate
    from oper.search.planner import tighten_bound

    stats = _stats(args)
    plan, problem = stated(args, stats)
    check_order(args.plan, plan, problem, stats)
    found = evaluate(plan, problem)
    priced = replace(plan, step_us=found.step_us, batch_size=problem.batch_size, lower_bound_us=0.0)
    # A bound for another machine, batch size or statistics does not apply.
    if is_for(plan, problem):
        return with_bound(priced, problem, plan.lower_bound_us, proof_of(plan)), problem
    if not found.fits:
        return with_bound(priced, problem, 0.0), problem
    return tighten_bound(priced, problem, max_work=0), problem


def check_order(path: str, plan: Plan, problem: Problem, stats: AccessStats | None) -> None:
    """Raise an OperError unless the plan is for the problem's tables and, as the cost model assumes
    of a plan with a hotness order, its hottest rows are those of the statistics, in their order."""
    plan.check_for([t.spec for t in problem.tables], problem.machine.world_size)
    other = []
    for t in problem.tables:
        head, hottest = plan.table(t.spec.name).head_ids, t.head_ids
        if stats is not None and stats.ids_in_hotness_order:
            hottest = np.arange(head.size)
        if (head[:hottest.size] != hottest[:head.size]).any():
            other.append(t.spec.name)
    require(f"cannot evaluate {path!r}", "pass the statistics that the plan was made from",
            ("tables with another hotness order in the statistics", other[:8], not other, "none"))


def machine_of(plan: Plan, name: str, world_size: int | None) -> Topology:
    """Return the topology for the ranks of a plan; raises as `topology_preset`.

    Args:
        plan: the plan.
        name: as for `topology_preset`. A topology with the ranks of all replica groups is divided.
        world_size: number of ranks of ``"this-host"``; None = that of the plan.
    """
    if name == THIS_HOST and world_size is None:
        world_size = plan.world_size
    topology = topology_preset(name, world_size)
    if topology.world_size == plan.world_size:
        return topology
    return topology.divided(plan.replica_groups)


def stated(args: argparse.Namespace, stats: AccessStats | None) -> tuple[Plan, Problem]:
    """Load the plan file and make the problem that it is evaluated for.

    What the arguments do not state (topology, batch size, constraints, overlap) is taken from the
    plan. If it was made with ``--dynamic-rows``, `stats` are of keys.
    """
    plan = Plan.load(args.plan)
    stats = None if stats is None else as_planned(stats, plan.notes)
    is_named = args.topology is not None
    if not is_named:
        args.topology = THIS_HOST if plan.topology.startswith(THIS_HOST) else plan.topology
    batch_size = plan.batch_size if args.batch_size is None else args.batch_size
    if args.batch_size is None and not batch_size:
        raise UsageError(f"cannot evaluate {args.plan!r}", "batch_size", 0,
                         "samples per rank and step, which this plan does not state",
                         "add --batch-size N")
    try:
        topology = machine_of(plan, args.topology, args.world_size)
    except InvalidInputError:
        if is_named or args.topology == THIS_HOST:
            raise
        raise UsageError(f"cannot evaluate {args.plan!r}", "topology", plan.topology,
                         "a preset's name in the plan, or --topology",
                         "pass the topology file of the plan with --topology") from None
    problem = make_problem([t.table for t in plan.tables], stats, topology,
                           objective=plan.objective, batch_size=batch_size,
                           constraints=plan.notes.get("constraints"))
    # The features allowed when the plan was made, and those that edits of the file have added.
    allow = check_allow(plan.notes.get("allow", problem.allow)) | used_features(
        plan, (t.spec.name for t in problem.free_tables))
    problem = replace(problem, allow=allow, fallback=problem.fallback - allow,
                      message_bits=plan.message_bits)
    overlap = parse_argument(getattr(args, "overlap", []))  # `oper simulate` has no such option
    return plan, with_overlap(problem, overlap or plan.notes.get("overlap_us"))


def as_planned(stats: AccessStats, notes: Mapping[str, Any]) -> AccessStats:
    """Return `stats` with the dynamic tables and the shared features that a plan's notes state."""
    dynamic, shared = notes.get(_DYNAMIC) or {}, notes.get(_SHARED)
    try:
        samples = max((int(of["samples_per_update"]) for of in dynamic.values()), default=0)
        tables = {name: DynamicRows(**{k: v for k, v in of.items() if k != "samples_per_update"})
                  for name, of in dynamic.items()}
    except InvalidInputError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidInputError("cannot read the plan", f"notes.{_DYNAMIC}", dynamic,
                                "num_rows, admit_after, eviction, half_life, time_to_live "
                                "and samples_per_update by table",
                                "plan again: earlier versions of 'oper plan' wrote other notes"
                                ) from None
    stats = stats_of_rows(stats, tables, samples)  # from keys to rows
    if shared is None:
        return stats
    if not isinstance(shared, dict) or not all(type(x) in (int, float) for x in shared.values()):
        raise InvalidInputError("cannot read the plan", f"notes.{_SHARED}", shared,
                                "samples per bag by feature",
                                "pass a plan file that 'oper plan' wrote")
    return replace(stats, samples_per_bag=shared)


def _shared(args: argparse.Namespace, stats: AccessStats) -> dict[str, float]:
    """Return the samples per bag of the features that the arguments of ``oper plan`` state, or
    those of the statistics."""
    if (args.user_features is None) != (args.candidates is None):
        raise UsageError("cannot plan user features", "--user-features, --candidates",
                         (args.user_features, args.candidates), "both or neither",
                         "pass the features, and the number of samples that share them")
    if args.user_features is None:
        return dict(stats.samples_per_bag)
    return dict.fromkeys((name.strip() for name in args.user_features.split(",")), args.candidates)


def _stats(args: argparse.Namespace) -> AccessStats | None:
    return None if args.stats is None else AccessStats.load(args.stats)


def _dynamic(args: argparse.Namespace, stats: AccessStats) -> dict[str, dict[str, Any]]:
    """Return by table the fields of `DynamicRows` that ``--dynamic-rows`` and `KEY_RULES` state,
    with times in updates, and ``samples_per_update``."""
    if args.dynamic_rows is None:
        for name in KEY_RULES:
            if getattr(args, name) is not None:
                raise UsageError("cannot plan", f"--{name.replace('_', '-')}", getattr(args, name),
                                 "no value without --dynamic-rows", "add --dynamic-rows ROWS")
        return {}
    if args.objective != "training":
        raise UsageError("cannot plan dynamic tables", "--objective", args.objective, "training",
                         "leave out --dynamic-rows: for inference, tables are static")
    text = args.dynamic_rows
    try:
        rows = (dict.fromkeys(stats.tables, int(text)) if "=" not in text else
                {name: int(number) for name, number in (name_values(text, ";") or {}).items()})
    except ValueError:
        rows = {}
    if not rows or not rows.keys() <= stats.tables.keys():
        raise UsageError("cannot plan dynamic tables", "--dynamic-rows", text,
                         "a number, or TABLE=NUMBER;... that names each table at most once; tables "
                         f"are {list(stats.tables)[:8]}", "write, for example, C3=4000000;C9=1000")
    settings = {"admit_after": args.admit_after or 1, "eviction": args.eviction or KEY_EVICTIONS[0],
                "half_life": args.half_life, "time_to_live": args.time_to_live,
                "samples_per_update": args.batch_size * topology_preset(
                    args.topology, args.world_size).world_size}
    return {name: {"num_rows": number, **settings} for name, number in rows.items()}


def _message_bits(args: argparse.Namespace) -> MessageBits:
    return EXACT if args.message_bits is None else MessageBits.from_text(args.message_bits)


def _tables(args: argparse.Namespace, stats: AccessStats) -> list[TableSpec]:
    """The tables of the file, or one table per table of the statistics with the given dim."""
    if args.tables is None:
        coded = args.dtype in CODE_BITS
        if coded and args.objective == "training":
            raise UsageError("cannot plan training", "--dtype", args.dtype,
                             "a type whose rows an optimizer can change",
                             "add --objective inference, or choose float32 or another float type")
        optimizer = args.optimizer or ("none" if coded else "rowwise_adagrad")
        return [TableSpec(name, t.num_rows, 64 if args.dim is None else args.dim, (name,),
                          optimizer=optimizer, dtype=args.dtype or "float32")
                for name, t in stats.tables.items()]
    given = [n for n in ("dim", "optimizer", "dtype") if getattr(args, n) is not None]
    if given:
        raise UsageError("cannot use two sources for the tables", "arguments", ["tables", *given],
                         "either --tables, or --dim, --optimizer and --dtype", "drop one of them")
    value = read_json(args.tables, f"cannot read {args.tables!r} as tables")
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise InvalidInputError("cannot read tables", "tables", args.tables,
                                "a JSON list of objects with TableSpec's fields",
                                "write the objects with oper.TableSpec.to_json")
    return [TableSpec.from_json(v) for v in value]


def _change(text: str) -> None:
    from oper.search.explain import what_if

    what_if.parse_change(text)


def read_constraints(path: str) -> dict[str, Any]:
    """Read a constraints file; raises OperError if it cannot be read or is not a JSON object."""
    value = read_json(path, f"cannot read {path!r} as constraints")
    if not isinstance(value, dict):
        raise InvalidInputError(f"cannot read {path!r}", "constraints", value, "a JSON object",
                                "write an object with the fields of oper.search.Constraints")
    return value
