"""``oper simulate``: replays real batches through a plan, with bytes and a timeline."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from oper.analysis.presence import Lookups
from oper.data.generate.generator import TableModel, bag_lengths
from oper.data.generate.popularity import Popularity
from oper.errors import InvalidInputError, UsageError, require
from oper.messages import MessageBits
from oper.plan import Plan
from oper.rows.traffic import KINDS, LINKS, SENT, link_classes, unit_bytes
from oper.search import plan_flags, verbs
from oper.search.cost.model import Evaluation, evaluate
from oper.search.problem.machine import TERMS
from oper.search.problem.statement import Problem
from oper.search.replay.realized import RealizedLoad, StepLoad
from oper.search.replay.simulate import Bags, RankBatch, Replay
from oper.search.replay.timeline import Schedule, Timeline, run
from oper.search.replay.wire import WireReplay
from oper.stats import AccessStats, TableStats
from oper.support.files import check_target
from oper.support.flags import checking_flags, number, whole
from oper.support.text import aligned
from oper.tables import TableSpec, format_bytes


def configure_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan written by 'oper plan' or by hand")
    parser.add_argument("--trace", metavar="DIR", help="preprocessed folder to take batches from")
    parser.add_argument("--split", default="train", choices=("train", "valid", "test"),
                        help="split of that folder (default train)")
    parser.add_argument("--stats", metavar="STATS",
                        help="statistics for the predicted figures (default: of the folder's "
                             "training part); without --trace, batches are drawn from them")
    plan_flags.add_machine(parser, "default: the plan's own")
    parser.add_argument("--batch-size", type=whole(1), metavar="N",
                        help="samples per rank and step (default: the plan's own)")
    parser.add_argument("--steps", type=whole(1), default=20, metavar="N",
                        help="maximum number of steps (default 20)")
    parser.add_argument("--clipped", nargs="+", default=(), metavar="TABLE",
                        help="tables with row gradients clipped by norm (max_row_norm); '*' = all")
    plan_flags.add_message_bits(parser, "default: the plan's")
    parser.add_argument("--dense-us", type=number(), default=0.0, metavar="US",
                        help="microseconds of dense compute per step, between lookup and backward "
                             "pass (default 0)")
    parser.add_argument("--in-flight", type=whole(1), default=1, metavar="K",
                        help="batches in flight: ids of up to K - 1 later batches are sorted "
                             "during dense compute (default 1)")
    parser.add_argument("--trace-out", metavar="F.json",
                        help="write the events as a Chrome trace, for ui.perfetto.dev")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N",
                        help="without --trace: seed of the draws (default 0)")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")


def run_simulate(args: argparse.Namespace) -> int:
    """Replay batches, print predicted and replayed figures, and write the trace if requested;
    returns the exit code."""
    if args.trace is None and args.stats is None:
        raise UsageError("nothing to replay", "--trace, --stats", None,
                         "a preprocessed folder, or statistics to draw batches from",
                         "pass --trace DIR or --stats FILE")
    if args.trace_out is not None:
        check_target(args.trace_out)
    stats = _statistics(args)
    plan, problem = verbs.stated(args, stats)
    verbs.check_order(args.plan, plan, problem, stats)
    if args.message_bits is not None:
        bits = MessageBits.from_text(args.message_bits)
        with checking_flags():
            bits.check_for(t.table for t in plan.tables)
        plan, problem = replace(plan, message_bits=bits), replace(problem, message_bits=bits)
    # The runtime reads rows in place among the ranks of a host, so hosts are its memory domains.
    wire = WireReplay(
        plan, problem.machine.host.tolist(), problem.training, clipped=_clipped(args.clipped, plan),
        dynamic=[t.spec.name for t in problem.tables if t.default_share is not None])
    found = simulate(plan, problem, _batches(args, plan, problem, stats), args.steps, wire)
    schedule = Schedule(problem.training, found.has_push, args.dense_us, args.in_flight)
    timeline = run(found.loads, schedule, plan.world_size)
    if args.trace_out is not None:
        timeline.write_trace(args.trace_out)
        print(f"wrote {args.trace_out}", file=sys.stderr)
    predicted = evaluate(plan, problem)
    value = as_json(found, predicted, timeline, problem)
    if args.json:
        print(json.dumps({"plan": args.plan, **value}))
    else:
        print(as_text(value), end="")
    return 0


@dataclass(slots=True, eq=False)
class Simulation:
    """The bytes and loads of replayed steps.

    Attributes:
        num_bytes: int64 [13, W, W], bytes read in all steps by kind (`oper.rows.traffic.KINDS`),
            reader and peer.
        sent_bytes: int64 [13, W, W], bytes sent in all steps between ranks of different hosts,
            by kind (`oper.rows.traffic.SENT`), sender and receiver.
        loads: the modelled loads, one per step.
        has_push: whether any tier is pushed.
    """

    num_bytes: np.ndarray
    sent_bytes: np.ndarray
    loads: list[StepLoad] = field(default_factory=list)
    has_push: bool = False


def simulate(plan: Plan, problem: Problem, batches: Iterator[list[RankBatch]], steps: int,
             wire: WireReplay) -> Simulation:
    """Replay up to `steps` steps of batches through a plan.

    Args:
        plan: the plan.
        problem: machine, costs and statistics.
        batches: yields for each step the batches of all ranks.
        steps: maximum number of steps.
        wire: counts bytes between hosts, and defines the tables whose gradients are clipped.

    Raises:
        InvalidInputError: there is no batch, or one does not fit the plan's tables.
    """
    replay = Replay(plan, clipped=wire.clipped, domain_of=problem.machine.host.tolist())
    realized = RealizedLoad(plan, problem)
    unit = [unit_bytes(t, stop - start)[:, None, None] for t, start, stop in replay.pieces]
    world = plan.world_size
    found = Simulation(np.zeros((len(KINDS), world, world), np.int64),
                       np.zeros((len(SENT), world, world), np.int64), has_push=realized.has_push)
    with tqdm(total=steps, desc="replaying", unit=" steps", disable=None) as bar:
        for ranks in batches:
            for size, counts in zip(unit, replay.counts(ranks), strict=True):
                found.num_bytes += counts * size
            found.sent_bytes += wire.step(ranks)
            found.loads.append(realized.step(ranks))
            bar.update(1)
            if len(found.loads) == steps:
                break
    if not found.loads:
        raise InvalidInputError("nothing to replay", "full batches", 0, ">= 1",
                                "use a smaller --batch-size or more data")
    return found


def _clipped(names: Sequence[str], plan: Plan) -> list[str]:
    """Return the names of the clipped tables; raises UsageError if a table is unknown."""
    known = [t.table.name for t in plan.tables]
    unknown = [n for n in names if n not in known and n != "*"]
    if unknown:
        raise UsageError("cannot replay the batches", "--clipped", unknown[:8],
                         f"some of {known[:8]}, or '*'", "name tables of the plan")
    return known if "*" in names else list(names)


# ---- batches -------------------------------------------------------------------------------------


def _statistics(args: argparse.Namespace) -> AccessStats:
    if args.stats is not None:
        return AccessStats.load(args.stats)
    from oper.data import analyze_folder

    return analyze_folder(args.trace, show_progress=sys.stderr.isatty())


def _batches(args: argparse.Namespace, plan: Plan, problem: Problem, stats: AccessStats
             ) -> Iterator[list[RankBatch]]:
    tables = [t.table for t in plan.tables]
    if args.trace is not None:
        shared = [t.spec.name for t in problem.tables if t.traffic.samples_per_bag > 1]
        require("cannot replay a folder", "pass --stats without --trace", (
            "tables of user features", shared[:8], not shared,
            "none, since a folder does not record which samples share them"))
        return folder_batches(args.trace, args.split, tables, problem.batch_size, plan.world_size)
    return drawn_batches(verbs.as_planned(stats, plan.notes), tables, problem.batch_size,
                         plan.world_size, args.seed)


def folder_batches(path: str, split: str, tables: list[TableSpec], batch_size: int,
                   world_size: int) -> Iterator[list[RankBatch]]:
    """Yield full batches of a preprocessed folder in order, each divided among the ranks.

    Raises:
        InvalidInputError: the folder lacks a feature of the tables.
    """
    from oper.data import Folder
    from oper.data.loading.groups import RowGroups, joined
    from oper.data.loading.windows import EpochOrder, WindowReader

    folder = Folder.open(path)
    features = [f for t in tables for f in _features(t)]
    missing = [f for f in features if f not in folder.sparse]
    if missing:
        raise InvalidInputError(f"cannot replay {path!r}", "missing features", missing[:8],
                                f"some of {list(folder.sparse)[:8]}",
                                "pass the folder that the plan was made for")
    groups = RowGroups(folder, split, folder.sparse, frozenset(folder.multi_hot))
    size = batch_size * world_size
    order = EpochOrder(groups.rows, size, window=0, seed=(0, 0), share=(0, 1))
    reader = WindowReader(groups, order, group_by="", num_near=1)
    for k in itertools.count():
        window = reader.read(k)
        if not window.order.size:
            return
        found = {f: joined(window.columns[f]) for f in features}
        for start in range(0, window.order.size - size + 1, size):
            yield [{f: _bags(found[f].part(at, at + batch_size).lookups) for f in features}
                   for at in range(start, start + size, batch_size)]


def _bags(found: Lookups) -> Bags:
    lengths = np.ones(found.ids.size, np.int64) if found.lengths is None else found.lengths
    return Bags(found.ids.astype(np.int64), lengths)


def drawn_batches(stats: AccessStats, tables: list[TableSpec], batch_size: int, world_size: int,
                  seed: int) -> Iterator[list[RankBatch]]:
    """Yield endless batches of independent ids and bag lengths, with the frequencies of `stats`.
    Bags that samples share occur once."""
    rng = np.random.default_rng(seed)
    num_bags = {f: max(1, round(batch_size / stats.samples_per_bag.get(f, 1.0)))
                for t in tables for f in _features(t)}
    models = {f: _model(t.name, stats.tables[t.name]) for t in tables for f in _features(t)}
    while True:
        yield [{f: _bags(model.draw(num_bags[f], 0, 0, rng)) for f, model in models.items()}
               for _ in range(world_size)]


def _features(table: TableSpec) -> tuple[str, ...]:
    return table.features or (table.name,)


def _model(name: str, stats: TableStats) -> TableModel:
    """A model of a table's lookups with the counted frequencies; rows that were never looked up are
    never drawn."""
    counts, rows = stats.count_levels()
    weights = counts.astype(np.float64) if counts.any() else np.ones(counts.size)
    return TableModel(name, Popularity.of(rows, weights, sort=False), bag_lengths(stats), 0.0,
                      stats.head_ids)


# ---- output --------------------------------------------------------------------------------------


def as_json(found: Simulation, predicted: Evaluation, timeline: Timeline, problem: Problem
            ) -> dict[str, Any]:
    """Return predicted and replayed figures as values that JSON can represent.

    Times and modelled bytes are per step; `bytes_read`, `bytes_sent`, `bytes_read_total` and
    `bytes_by_pair` are totals over all steps.
    """
    steps = len(found.loads)
    link = link_classes(problem.machine.world_size, problem.topology)
    phases = []
    for k, expected in enumerate(predicted.phases):
        real = [load.phases[k] for load in found.loads]
        units = np.mean([p.units for p in real], axis=0)
        phases.append({
            "name": expected.name, "predicted_us": expected.time_us,
            "replayed_us": float(np.mean([p.time_us for p in real])),
            "slowest_replayed_us": float(np.max([p.time_us for p in real])),
            "binding": ", ".join(  # the most frequent one first
                name for name, _ in Counter(p.binding for p in real).most_common()),
            "predicted_bytes": {t: float(expected.units[n].sum()) for n, t in enumerate(TERMS)
                                if t != "compute"},
            "replayed_bytes": {t: float(units[n].sum()) for n, t in enumerate(TERMS)
                               if t != "compute"}})
    return {
        "topology": problem.topology.name, "source": problem.topology.source,
        "objective": problem.objective, "world_size": problem.machine.world_size,
        "batch_size": problem.batch_size, "num_steps": steps,
        "predicted_step_us": predicted.step_us,
        "replayed_step_us": sum(p["replayed_us"] for p in phases),
        "timeline_step_us": timeline.step_us, "phases": phases,
        "bytes_read": {name: {c: int(found.num_bytes[k][link == n].sum())
                              for n, c in enumerate(LINKS)}
                       for k, name in enumerate(KINDS) if found.num_bytes[k].any()},
        "bytes_sent": {name: {LINKS[-1]: int(found.sent_bytes[k].sum())}
                       for k, name in enumerate(SENT) if found.sent_bytes[k].any()},
        "bytes_read_total": int(found.num_bytes.sum()),
        "bytes_by_pair": found.num_bytes.sum(axis=0).tolist()}


def as_text(value: dict[str, Any]) -> str:
    """Format the result of `as_json` as text."""
    def by_link(found: dict[str, dict[str, int]], links: Sequence[str]) -> list[str]:
        return aligned([["", *links], *(
            [name, *(format_bytes(b / value["num_steps"]) for b in by.values())]
            for name, by in found.items())])

    constants = "measured" if value["source"] == "measured" else f"{value['source']}, modelled"
    times = [[p["name"], *(f"{p[key]:.1f}" for key in (
        "predicted_us", "replayed_us", "slowest_replayed_us")), p["binding"]]
        for p in value["phases"]]
    times += [["step", *(f"{value[f'{how}_step_us']:.1f}" for how in ("predicted", "replayed")),
               "", ""],
              ["timeline", "", f"{value['timeline_step_us']:.1f}", "", "with overlap and waiting"]]
    sizes = [[p["name"], term, format_bytes(p["predicted_bytes"][term]), format_bytes(b)]
             for p in value["phases"] for term, b in p["replayed_bytes"].items()
             if b or p["predicted_bytes"][term]]
    lines = [f"{value['num_steps']} steps of {value['objective']} on {value['topology']} "
             f"({constants} constants), {value['world_size']} ranks, batch size per rank "
             f"{value['batch_size']}", "",
             *aligned([["phase", "predicted us", "replayed us", "slowest us", "limited by"],
                       *times], (0, 4)), "",
             "bytes per step, all ranks",
             *aligned([["phase", "of", "predicted", "replayed"], *sizes], (0, 1)), "",
             "bytes that the host runtime reads per step (a row for every id), all ranks",
             *by_link(value["bytes_read"], LINKS)]
    if value["bytes_sent"]:
        lines += ["", "bytes that hosts send each other per step (a row once per reader)",
                  *by_link(value["bytes_sent"], LINKS[-1:])]
    return "\n".join(lines) + "\n"
