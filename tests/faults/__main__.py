"""``python -m tests.faults``: inject every fault at every phase and print the results.

With ``--json F`` each injection is written to F as soon as it is judged, and a later call with the
same file continues. An injection during which this program itself was stopped proves nothing: it is
counted separately and repeated.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oper.bench.core import record
from tests.faults import files, injection, memory, network
from tests.faults.injection import Injection, Outcome
from tests.faults.pauses import Pauses
from tests.support import ROOT


@dataclass
class Pair:
    """A fault at a phase.

    Attributes:
        fault, phase: names.
        once: makes one injection, drawn with a random generator; None = impossible on this machine.
        lacking: what the machine lacks if `once` is None.
        outcomes: outcomes of the injections so far.
    """

    fault: str
    phase: str
    once: Callable[[random.Random], Outcome] | None
    lacking: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.phase}"


def pairs(root: Path) -> Iterator[Pair]:
    """Yield all pairs, those with faults of ranks first."""
    for phase in injection.PHASES:
        for fault in injection.FAULTS:
            yield Pair(fault, phase, _of_a_rank(fault, phase))
    for phase in ("update", "checkpoint write"):
        yield Pair("memory limit", phase,
                   _of_a_rank("memory limit", phase) if memory.can_limit() else None,
                   "rights to make a control group that limits memory")
    library = network.build_redirect(root)
    for fault in network.FAULTS:
        yield Pair(f"{fault} connections", "exchange",
                   (lambda rng, f=fault: network.inject(f, rng, library)) if library else None,
                   "a C compiler")
    work = root / "work"
    work.mkdir()
    mounts = files.can_mount()
    for what in files.WRITES:
        yield Pair("full disk", f"write {what}",
                   (lambda rng, w=what: files.full_disk(w, rng, work, True)) if mounts else None,
                   "rights to mount a file system")
        yield Pair("file size limit", f"write {what}",
                   lambda rng, w=what: files.full_disk(w, rng, work, False))
        yield Pair("read-only folder", f"write {what}",
                   lambda rng, w=what: files.read_only_folder(w, rng, work))
    (root / "samples").mkdir()
    samples = files.make_samples(root / "samples")
    for kind in files.KINDS:
        for how in files.DAMAGES:
            yield Pair(how, f"read {kind}", lambda rng, k=kind, h=how: files.damaged_file(
                samples[k], h, rng, work))


def _of_a_rank(fault: str, phase: str) -> Callable[[random.Random], Outcome]:
    return lambda rng: injection.inject(Injection.draw(fault, phase, rng))


def line(pair: Pair) -> str:
    """Format a row of the printed table."""
    start = f"{pair.fault:<20} {pair.phase:<18}"
    if pair.once is None:
        return f"{start} skipped: this machine lacks {pair.lacking}"
    times = [o.detection_s for o in pair.outcomes if o.detection_s is not None]
    detection = (f"{statistics.median(times):6.2f} {max(times):6.2f}" if times else f"{'-':>6} "
                 f"{'-':>6}")
    return (f"{start} {len(pair.outcomes):>5} {sum(o.kept for o in pair.outcomes):>8} {detection} "
            f"{sum(len(o.leftovers) for o in pair.outcomes):>9}")


class Journal:
    """All injections, stored in a file if a path is given.

    Attributes:
        interrupted: number of injections without a result, since this program was stopped
            meanwhile.
    """

    def __init__(self, path: Path | None, seed: int) -> None:
        self._path, self._seed = path, seed
        self._pairs: dict[str, dict[str, Any]] = {}
        self.interrupted, self.seconds = 0, 0.0
        if path is not None and path.exists():
            held = json.loads(path.read_text())
            if held["seed"] != seed:
                raise SystemExit(f"{path} is of seed {held['seed']}, not {seed}")
            self._pairs = {entry["name"]: entry for entry in held["cases"]}
            self.interrupted, self.seconds = held["interrupted"], held["seconds"]

    def fill(self, pair: Pair) -> None:
        """Set the outcomes of a pair to those in the file."""
        held = self._pairs.get(pair.name, {"outcomes": []})["outcomes"]
        pair.outcomes = [Outcome(**{k: v for k, v in o.items() if k != "commit"}) for o in held]

    def note(self, pair: Pair, seconds: float, outcome: Outcome | None) -> None:
        """Record an injection's outcome (None = it was interrupted), or that a pair is skipped."""
        self.seconds = round(self.seconds + seconds, 1)
        if pair.once is None:
            self._pairs[pair.name] = {"name": pair.name, "lacking": pair.lacking, "outcomes": []}
        elif outcome is None:
            self.interrupted += 1
        else:
            fields = {k: v for k, v in asdict(outcome).items()
                    if v is not True and v not in (None, [])}
            entry = self._pairs.setdefault(pair.name, {"name": pair.name, "outcomes": []})
            entry.pop("lacking", None)  # of a record that another machine began
            entry["outcomes"].append({"commit": _commit()} | fields)
        if self._path is not None:
            record.write(self._path, record.record(
                "faults", ["python", "-m", "tests.faults", *sys.argv[1:]],
                list(self._pairs.values()), record.load_average())
                | {"seed": self._seed, "interrupted": self.interrupted, "seconds": self.seconds})


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True,
                          capture_output=True, check=False)
    return done.stdout.strip()


def _one(pair: Pair, rng: random.Random) -> Outcome:
    """Make an injection; an exception that it raises is a broken guarantee."""
    assert pair.once is not None
    try:
        return pair.once(rng)
    except Exception:
        return Outcome(False, broken=[traceback.format_exc()])


def run(pair: Pair, tries: int, seed: int, journal: Journal, pauses: Pauses) -> None:
    """Inject until the pair has `tries` outcomes."""
    journal.fill(pair)
    if pair.once is None:
        journal.note(pair, 0.0, None)
        return
    while len(pair.outcomes) < tries:
        stops, began = pauses.count, time.monotonic()
        outcome = _one(pair, random.Random(f"{seed} {pair.name} {len(pair.outcomes)}"))
        stopped = pauses.count > stops
        journal.note(pair, time.monotonic() - began, None if stopped else outcome)
        if stopped:
            continue
        pair.outcomes.append(outcome)
        for what in (*outcome.broken, *(f"left: {x}" for x in outcome.leftovers)):
            print(f"  {pair.name}: {what}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=10, help="injections of every pair")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="pairs whose name holds this")
    parser.add_argument("--json", type=Path, metavar="F", help="kept there, gone on with")
    args = parser.parse_args()
    print(f"{'fault':<20} {'phase':<18} {'tries':>5} {'as prom.':>8} {'median':>6} {'max s':>6} "
          f"{'leftovers':>9}")
    outcomes: list[Outcome] = []
    journal = Journal(args.json, args.seed)
    with tempfile.TemporaryDirectory(prefix="oper-faults-") as folder, \
            Pauses().watched() as pauses:
        root = Path(folder)
        root.chmod(0o755)
        for pair in pairs(root):
            if args.only not in pair.name:
                continue
            run(pair, args.tries, args.seed, journal, pauses)
            print(line(pair), flush=True)
            outcomes += pair.outcomes
    broken = sum(not o.kept for o in outcomes)
    left = sum(len(o.leftovers) for o in outcomes)
    print(f"{len(outcomes)} injections, {broken} guarantees broken, {left} leftovers, "
          f"{journal.interrupted} interrupted and made again, seed {args.seed}, "
          f"{journal.seconds:.0f} s")
    return 1 if broken or left else 0


if __name__ == "__main__":
    raise SystemExit(main())
