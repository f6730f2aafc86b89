"""``python -m tests.faults.soak``: a training run that is killed repeatedly.

Ranks are killed at random moments, and all ranks are started again until the run ends normally. Its
weights must equal those of an undisturbed run, bit for bit.
"""

import argparse
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from oper.bench.core import record
from oper.data import (
    PreprocessOptions,
    SyntheticLog,
    load_recipe,
    preprocess,
    write_synthetic_log,
)
from oper.train.config import load_config
from tests.faults.pauses import Pauses
from tests.world_support import RankFailedError, leftovers, report, world

WORLD_SIZE = 2


@dataclass
class Soak:
    """The result of a soak test.

    Attributes:
        faults: number of ranks killed.
        lives: number of times that the ranks were started.
        interrupted: number of lives without a result, since this program itself was stopped
            meanwhile.
        seconds: duration.
        saved_steps: step from which each life resumed.
        problems: guarantees that were not kept.
        same: whether the final weights equal those of the undisturbed run.
    """

    faults: int = 0
    lives: int = 0
    interrupted: int = 0
    seconds: float = 0.0
    saved_steps: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    same: bool = False


def make_run(model: str, folder: Path) -> dict[str, Any]:
    """Settings of a short run of a model, with many checkpoints, on generated data."""
    common = {"model.dim": 8, "epochs": 1000, "log_every": 5, "checkpoint_every": 10,
              "delta_every": 5}
    if model not in _DLRMS:
        return common | {
            "model.name": model, "catalogue.num_items": 300, "catalogue.num_users": 200,
            "catalogue.length": 12, "batch_size": 16, "optimizer.dense": "adam",
            "eval_users": 20} | _SIZES[model]
    cardinalities = tuple(5 + 37 * k for k in range(26))
    write_synthetic_log(folder / "log.txt", SyntheticLog(8_000, 3, cardinalities, effect=2.5))
    preprocess(load_recipe("criteo-kaggle"), [str(folder / "log.txt")], folder / "data",
               PreprocessOptions(raw_ids=model == "dynamic"))
    return common | {"data": str(folder / "data"), "batch_size": 64, "model.dense_layers": [16],
                     "model.over_layers": [16]} | _DLRMS[model]


# Some dynamic tables are full, so that keys wait, expire and are evicted.
_DLRMS: dict[str, dict[str, Any]] = {"dlrm": {}, "dynamic": {
    "dynamic.rows": 200, "dynamic.admit_after": 2, "dynamic.half_life": 20,
    "dynamic.eviction": "lfu", "dynamic.time_to_live": 40}}

_SIZES = {"cdt4rec": {"model.steps": 6, "model.window": 4, "model.negatives": 32, "model.heads": 2},
          "cadvae": {"model.num_concepts": 3, "model.hidden": 16, "model.graph": "free"}}


def run(rank: int, world_size: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Run one rank of one life."""
    from oper.errors import DeadlineError, PeerLostError
    from oper.train import loop

    report({"in": True})
    original = loop.Checkpoints.load

    def load(self: Any) -> int:
        step = original(self)
        report({"from": step})
        return step

    loop.Checkpoints.load = load  # type: ignore[method-assign]
    try:
        return {"end": loop.train(load_config(None, flags), False, resume=True)}
    except (PeerLostError, DeadlineError) as error:
        return {"lost": str(error)}


def soak(faults: int, flags: dict[str, Any], seed: int, folder: Path, pauses: Pauses) -> Soak:
    """Kill ranks of a run, then let it end; its ``max_steps`` must suffice for all kills."""
    result, rng, began = Soak(), random.Random(seed), time.monotonic()
    disturbed = flags | {"out": str(folder / "disturbed")}
    ended = False
    while not ended:
        result.lives += 1
        stops, life = pauses.count, Soak()
        ended = _live(disturbed, rng, life, result.faults < faults)
        if pauses.count > stops:
            result.interrupted += 1
        else:
            result.faults += life.faults
            result.problems += life.problems
        result.saved_steps += life.saved_steps
        if life.problems and not life.faults and pauses.count == stops:
            return result  # it fails without a kill
    calm = flags | {"out": str(folder / "calm")}
    stops, life = pauses.count, Soak()
    while not _live(calm, rng, life, False):
        if pauses.count == stops:
            raise AssertionError(f"the undisturbed run fails: {life.problems}")
        stops = pauses.count  # it was stopped for longer than ranks wait
    mine, other = (torch.load(folder / n / "state.pt", weights_only=True)
                   for n in ("disturbed", "calm"))
    result.same = mine.keys() == other.keys() and all(torch.equal(mine[k], other[k])
                                                      for k in other)
    if result.faults < faults:
        result.problems.append("the run ended before all faults had happened: it needs more steps")
    result.seconds = time.monotonic() - began
    return result


def _live(flags: dict[str, Any], rng: random.Random, result: Soak, kill: bool) -> bool:
    """Run from the last checkpoint until the run ends or fails; returns whether it has finished."""
    with world(WORLD_SIZE, run, flags, timeout_s=600) as running:
        if kill and _kill_one(running, rng, result):
            return False
        try:
            answers = [_last(running, r, result) for r in range(WORLD_SIZE)]
        except RankFailedError as error:
            result.problems.append(f"an undisturbed life failed: {error}")
            return False
        if all("end" in a for a in answers):
            return True
        result.problems.append(f"an undisturbed life failed: {answers}")
        return False


def _kill_one(running: Any, rng: random.Random, result: Soak) -> bool:
    """Kill a rank at a random moment and check the survivors; False if the run ended before."""
    for rank in range(WORLD_SIZE):  # before they connect, a launcher has to end the others
        running.receive(rank)
    victim = rng.randrange(WORLD_SIZE)
    process = running.processes[victim]
    process.join(rng.random() * 1.5)
    if not process.is_alive():
        return False
    process.kill()
    result.faults += 1
    for rank in range(WORLD_SIZE):
        if rank == victim:
            continue
        try:
            answer = _last(running, rank, result)
            if "lost" in answer and f"rank={victim}," not in answer["lost"] and (
                    "gloo" not in answer["lost"] and "collective" not in answer["lost"]):
                result.problems.append(f"rank {rank} blames another: {answer}")
        except RankFailedError as error:
            # Before there are shared tables, a dead peer is an error of gloo's.
            text = str(error).strip().splitlines()[-1]
            if "Connect" not in text and "gloo" not in text:
                result.problems.append(f"rank {rank}: {text}")
    pids = running.pids
    running.close()
    result.problems += leftovers(pids)
    return True


def _last(running: Any, rank: int, result: Soak | None = None) -> dict[str, Any]:
    """Return a rank's last report; record the step from which it resumed."""
    while True:
        answer: dict[str, Any] = running.receive(rank)
        if "from" not in answer and "in" not in answer:
            return answer
        if result is not None and "from" in answer:
            result.saved_steps.append(answer["from"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--model", choices=[*_DLRMS, *_SIZES], default="dlrm")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="F", help="write what came of it")
    args, load = parser.parse_args(), record.load_average()
    with tempfile.TemporaryDirectory(prefix="oper-soak-") as folder, Pauses().watched() as pauses:
        flags = make_run(args.model, Path(folder)) | {"max_steps": args.steps}
        result = soak(args.faults, flags, args.seed, Path(folder), pauses)
    print(f"{result.faults} kills, {result.lives} lives ({result.interrupted} interrupted), "
          f"{len(set(result.saved_steps))} different steps gone on from, "
          f"weights {'equal' if result.same else 'DIFFERENT'}, "
          f"{len(result.problems)} broken guarantees, {result.seconds:.0f} s")
    for problem in result.problems:
        print(f"  {problem}")
    if args.json is not None:
        case = {"name": args.model, "steps": args.steps, "seed": args.seed, **asdict(result)}
        record.write(args.json, record.record(
            "soak", ["python", "-m", "tests.faults.soak", *sys.argv[1:]], [case], load))
    return 0 if result.same and not result.problems else 1


if __name__ == "__main__":
    raise SystemExit(main())
