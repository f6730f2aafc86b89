"""``python -m tests.faults``: inject every fault at every phase and print what came of it."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import files, injection, memory, network
from tests.faults.injection import Injection, Outcome


@dataclass
class Pair:
    """A fault at a phase.

    Attributes:
        fault, phase: names.
        once: makes one injection from random numbers; None where this machine cannot.
        lacking: what the machine lacks then.
    """

    fault: str
    phase: str
    once: Callable[[random.Random], Outcome] | None
    lacking: str = ""
    outcomes: list[Outcome] = field(default_factory=list)


def pairs(root: Path) -> Iterator[Pair]:
    """All pairs, those of ranks first."""
    for phase in injection.PHASES:
        for fault in injection.FAULTS:
            yield Pair(fault, phase, _of_a_rank(fault, phase))
    for phase in ("update", "checkpoint write"):
        yield Pair("memory limit", phase,
                   _of_a_rank("memory limit", phase) if memory.can_limit() else None,
                   "rights to make a control group (version 2)")
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
    """A row of the table."""
    start = f"{pair.fault:<20} {pair.phase:<18}"
    if pair.once is None:
        return f"{start} skipped: this machine lacks {pair.lacking}"
    times = [o.detection_s for o in pair.outcomes if o.detection_s is not None]
    detection = (f"{statistics.median(times):6.2f} {max(times):6.2f}" if times else f"{'-':>6} "
                 f"{'-':>6}")
    return (f"{start} {len(pair.outcomes):>5} {sum(o.kept for o in pair.outcomes):>8} {detection} "
            f"{sum(len(o.leftovers) for o in pair.outcomes):>9}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--tries", type=int, default=10, help="injections of every pair")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="pairs whose name holds this")
    args = parser.parse_args()
    print(f"{'fault':<20} {'phase':<18} {'tries':>5} {'as prom.':>8} {'median':>6} {'max s':>6} "
          f"{'leftovers':>9}")
    began, tries, broken, left = time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="oper-faults-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        for number, pair in enumerate(pairs(root)):
            if args.only not in f"{pair.fault} {pair.phase}":
                continue
            rng = random.Random(args.seed * 1000 + number)
            for _ in range(args.tries if pair.once else 0):
                assert pair.once is not None
                outcome = pair.once(rng)
                pair.outcomes.append(outcome)
                for what in (*outcome.broken, *(f"left: {x}" for x in outcome.leftovers)):
                    print(f"  {pair.fault}, {pair.phase}: {what}", file=sys.stderr)
            print(line(pair), flush=True)
            tries += len(pair.outcomes)
            broken += sum(not o.kept for o in pair.outcomes)
            left += sum(len(o.leftovers) for o in pair.outcomes)
    print(f"{tries} injections, {broken} promises broken, {left} leftovers, seed {args.seed}, "
          f"{time.monotonic() - began:.0f} s")
    return 1 if broken or left else 0


if __name__ == "__main__":
    raise SystemExit(main())
