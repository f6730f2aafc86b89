"""Run many programs, summarise their results, and shrink failing ones."""

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from oper.support.text import aligned
from tests.programs.oracle import OUTCOMES, Finding
from tests.programs.program import Program, draw_program
from tests.programs.table import ACTIONS
from tests.programs.workers import BROKEN, Local, Processes

# ---- smaller programs that fail alike ------------------------------------------------------------

_SGD = {"kind": "sgd", "by": "argument", "arguments": {"lr": 0.25}}
# The plainest value of each field of a model; elements of lists are removed where possible.
_PLAIN = {"dense": "", "half": False, "padding": None, "weighted": False, "last": False,
          "mode": "sum", "subclass": "", "need_indices": False, "rows": 4, "dim": 1}


def shrink(program: Program, fails: Callable[[Program], bool], budget: int = 250) -> Program:
    """Return the smallest program found that fails in the same way.

    Args:
        program: a program that fails.
        fails: whether a program fails in that way; false for one that cannot be built.
        budget: maximum number of programs to try.
    """
    tries = 0
    improved = True
    while improved and tries < budget:
        improved = False
        for candidate in _smaller(program):
            tries += 1
            if tries > budget:
                break
            if fails(candidate):
                program, improved = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield slightly simpler programs, the largest simplifications first."""
    actions = program.actions
    for size in (len(actions) // 2, len(actions) // 4, 2, 1):
        for begin in range(0, len(actions), size) if size else ():
            yield replace(program, actions=actions[:begin] + actions[begin + size:])
    model = program.model
    models = list(_plainer(model))
    if len(model["embs"]) == 1 and not model["dense"]:
        models.append(model | {"container": "bare"})
    simpler: dict[str, list[Any]] = {
        "wrapper": [""], "dist": [False], "plan": [0], "model": models,
        "optimizer": [_SGD, program.optimizer | {"by": "argument"}]}
    for name, values in simpler.items():
        for value in values:
            if getattr(program, name) != value:
                yield replace(program, **{name: value})
    for k, (name, args) in enumerate(actions):
        usual = {"table": 0, "seed": 1, "shapes": ["usual"] * len(args["shapes"])} | {
            n: values[0] for n, values in ACTIONS[name].choices.items()}
        one = {"shapes": ["one"] * len(args["shapes"])}
        for change in (*({key: value} for key, value in usual.items()), one):
            if args | change != args:
                yield replace(program, actions=[
                    *actions[:k], (name, args | change), *actions[k + 1:]])


def _plainer(data: Any) -> Iterator[Any]:
    """Yield dictionaries with one value replaced by that of `_PLAIN`, lists without one element,
    and the same for nested values."""
    if isinstance(data, dict):
        for name, value in data.items():
            if value != _PLAIN.get(name, value):
                yield data | {name: _PLAIN[name]}
            for inner in _plainer(value):
                yield data | {name: inner}
    elif isinstance(data, list):
        for k, value in enumerate(data):
            if len(data) > 1:
                yield data[:k] + data[k + 1:]
            for inner in _plainer(value):
                yield [*data[:k], inner, *data[k + 1:]]


@dataclass
class Totals:
    """The results of many programs.

    Attributes:
        counts: by action and outcome.
        refusals: number of refusals by OPER alone, by action and text.
        findings: first program of each kind of failure, and the number of such failures.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: dict[tuple[str, str, str], tuple[int, Program, Finding]] = field(
        default_factory=dict)
    failures: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    programs: int = 0

    def add(self, seed: int, program: Program, report: Any) -> bool:
        """Add the report of a program; return whether it failed in a new way."""
        self.programs += 1
        self.counts += report.counts
        self.refusals += report.refusals
        if report.finding is None:
            return False
        signature = report.finding.signature
        self.failures[signature] += 1
        self.findings.setdefault(signature, (seed, program, report.finding))
        return self.failures[signature] == 1

    def progress(self, seconds: float) -> str:
        """Format a line of progress."""
        return (f"{self.programs:,} programs, {self.programs / seconds:.1f} a second, "
                f"{sum(self.failures.values()):,} failed ({len(self.findings)} ways)")

    def table(self) -> str:
        """Format a table of actions by outcome."""
        names = sorted({name for name, _ in self.counts})
        rows = [["action", "tried", "agreed", "both refused", "OPER refused", "failed"]]
        for name in names:
            found = [self.counts[name, outcome] for outcome in (*OUTCOMES, BROKEN)]
            rows.append([name, *(f"{n:,}" for n in (sum(found), *found[:3], sum(found[3:])))])
        return "\n".join(aligned(rows))


def run_seeds(seeds: Iterable[int], world_size: int, *, only: str | None = None,
              skip: Collection[str] = (), jobs: int = 1, fault: str | None = None,
              stop_at: int | None = None, quiet: bool = False) -> Totals:
    """Run the programs of some seeds.

    Args:
        seeds: seeds of the programs.
        world_size: number of ranks.
        only: an action that is drawn often.
        skip: actions that are not drawn.
        jobs: number of processes with one rank, otherwise of groups of processes; 0 = this process
            (one rank only).
        fault: one of `faults.FAULTS`, which is planted.
        stop_at: stop after this many findings of different kinds.
        quiet: print no progress.
    """
    totals, lock, left = Totals(), threading.Lock(), iter(seeds)
    begin = shown = time.monotonic()
    errors: list[BaseException] = []

    def work() -> None:
        nonlocal shown
        worker: Any = Local(fault) if jobs == 0 else Processes(world_size, fault)
        try:
            while True:
                with lock:
                    enough = stop_at is not None and len(totals.findings) >= stop_at
                    seed = None if enough or errors else next(left, None)
                if seed is None:
                    return
                program = draw_program(seed, world_size, only, skip)
                report = worker.run(program)
                with lock:
                    if totals.add(seed, program, report) and not quiet:
                        print(f"seed {seed}, {report.finding.action}: "
                              f"{report.finding.text.partition(chr(10))[0]}",
                              file=sys.stderr, flush=True)
                    now = time.monotonic()
                    if not quiet and now - shown > 5:
                        shown = now
                        print(totals.progress(now - begin), file=sys.stderr, flush=True)
        except BaseException as error:
            errors.append(error)
        finally:
            worker.close()

    if jobs == 0:
        gc.freeze()  # imported objects need not be scanned by every collection
        work()
    else:
        threads = [threading.Thread(target=work) for _ in range(jobs)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    if errors:
        raise errors[0]
    return totals


def smallest(program: Program, finding: Finding, *, budget: int, local: bool = False
             ) -> tuple[Program, Finding]:
    """Shrink a failing program; return it and its finding."""
    worker: Any = Local() if local else Processes(program.world_size)
    last = finding

    def fails(candidate: Program) -> bool:
        nonlocal last
        found = worker.run(candidate).finding
        same = found is not None and found.signature == finding.signature
        if same:
            last = found
        return same

    try:
        return shrink(program, fails, budget), last
    finally:
        worker.close()
