"""``python -m tests.programs``: random programs against an unsharded and a sharded model.

Prints the outcomes of every action and, for each kind of failure, the smallest failing program that
was found, as Python text for ``--run FILE``. Exits with status 1 if any program failed.
"""

import argparse
import sys
import warnings

from tests.programs.program import Program
from tests.programs.runner import run_seeds, smallest
from tests.programs.table import ACTIONS
from tests.programs.workers import Local, Processes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="first:last+1")
    parser.add_argument("--world-size", type=int, default=1, choices=[1, 2])
    parser.add_argument("--only", choices=sorted(ACTIONS), help="draw this action often")
    parser.add_argument("--skip", default="", help="actions, separated by commas, not to be drawn")
    parser.add_argument("--jobs", type=int, default=1,
                        help="groups of processes; 0: in this process (one rank)")
    parser.add_argument("--budget", type=int, default=250, help="programs tried to shrink one")
    parser.add_argument("--run", help="run the program in this file instead")
    parser.add_argument("--debug", action="store_true", help="with --run: in this process")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.run:
        return _run_one(args.run, args.debug)
    first, _, last = args.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    totals = run_seeds(seeds, args.world_size, only=args.only, skip=args.skip.split(","),
                       jobs=args.jobs)
    print(totals.table())
    for (name, text), number in sorted(totals.refusals.items()):
        print(f"OPER refused {name} {number:,} times: {text}")
    for signature, number in totals.failures.most_common():
        seed, program, finding = totals.findings[signature]
        if args.budget:
            program, finding = smallest(program, finding, budget=args.budget)
        print(f"\n{number:,} programs failed in {finding.action} ({finding.kind}), first seed "
              f"{seed}:\n{finding.text}\n{program.text()}", flush=True)
    total = sum(totals.failures.values())
    print(f"\n{totals.programs:,} programs at W = {args.world_size}, {total:,} failed")
    return int(total > 0)


def _run_one(path: str, debug: bool) -> int:
    """Run the program in a file."""
    with open(path) as file:
        program = eval(file.read(), {"Program": Program})
    worker = Local() if debug else Processes(program.world_size)
    report = worker.run(program)
    worker.close()
    print(report.finding.text if report.finding else "no difference")
    return int(report.finding is not None)


if __name__ == "__main__":
    sys.exit(main())
