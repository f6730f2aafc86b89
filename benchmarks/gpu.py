"""Run all builds, tests and benchmarks of the device back end that need a GPU, in one command.

    python benchmarks/gpu.py --out DIR [--fbgemm FOLDER] [--wheels FOLDER] [--limit SECONDS]
                             [--resume FILE] [--only GLOB] [--list]

Parts run one after another, the most informative first: a description of the machine; the build;
the most important tests (equality with the host back end, TorchRec's pipeline with late copies, two
processes that share the device, steps in a CUDA graph); cases of `oper bench lookup --device cuda`;
a batch of 256 samples in a CUDA graph; the time of every kernel of a step; all tests of tests/cuda;
the remaining cases; one case of `oper bench train`; compute-sanitizer.
--list prints their names and time limits without running them.

A part that fails, crashes or exceeds its time limit does not stop the run. After every part, DIR
has gpu.json (states, times and figures), summary.md (figures compared with their targets) and
log.txt. --limit is the time limit of a call. A later call with --resume and the gpu.json of the
preceding one runs the missing parts, so that three calls of 570 seconds replace one of half an
hour. Every call runs the build, which takes little time if it is up to date.

The FOLDER of --fbgemm is the output of benchmarks/fbgemm_one_arch.py; without --fbgemm and without
an installed fbgemm_gpu there is no comparison with fbgemm. --wheels installs missing wheels.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "gpu"  # temporary files
_PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-ra"]
# Small training runs, under tools that slow kernels down many times.
_CHOSEN = {
    "memcheck": "test_training_gives_the_hosts_bits and 2-mixed0 or test_push and True-2",
    # With two ranks, training exceeds their deadline.
    "racecheck": "test_training_gives_the_hosts_bits and 1-striped or test_push and True-2"}
_SANITIZER = ["compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all"]
_REPEATED = ("build",)  # parts that every call runs
_TAIL = 25  # last lines of a part's log that the record includes
_MACHINE = """
import json, platform, torch
p = torch.cuda.get_device_properties(0)
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "name": p.name,
                  "python": platform.python_version(), "processors": p.multi_processor_count,
                  "memory_bytes": p.total_memory, "capability": [p.major, p.minor]}))
"""
# Prints the kernels of training steps (8192 samples, 26 tables, dim 128) by time, and their number.
_KERNELS = """
import json, sys, torch
from oper.plan import uniform_plan
from oper.shmem.batch import Lookup
from oper.shmem.device.tables import DeviceTables
from oper.shmem.group.groups import SingleGroup
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.passes import Backward
from oper.tables import TableSpec
F, B, rows, dim, device = 26, int(sys.argv[2]), int(sys.argv[3]), 128, sys.argv[4]
pooling = int(sys.argv[5])
specs = [TableSpec(f"t{k}", rows, dim, (f"f{k}",), "sum", "float32", "rowwise_adagrad")
         for k in range(F)]
tables = DeviceTables(uniform_plan(specs, 1), [(f"f{k}", f"t{k}") for k in range(F)],
                      SingleGroup(), RowWiseAdagrad(lr=0.1), device=device)
batch = Lookup(torch.randint(0, rows, (F * B * pooling,), device=device),
               torch.full((F * B,), pooling, device=device), torch.arange(F), B)
def step():
    out, offsets = tables.forward(batch, collective=True)
    tables.apply_all([Backward((torch.ones_like(out),), batch, offsets)])
for _ in range(3):
    step()
tables.synchronize()
with torch.profiler.profile() as found:
    for _ in range(10):
        step()
    tables.synchronize()
kernels = sorted(((e.device_time_total / 10, e.count / 10, e.key[:120])
                  for e in found.key_averages()
                  if e.device_type == torch.autograd.DeviceType.CUDA), reverse=True)
for us, count, name in kernels[:30]:
    print(f"{us:9.1f} us  {count:5.1f}  {name}")
json.dump({"kernels": kernels, "per_step": sum(c for _, c, _ in kernels)}, open(sys.argv[1], "w"))
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A command to run.

    Attributes:
        name: the part's name in the record.
        command: words of the command.
        limit_s: time (s) after which it is killed.
        json: file to which it writes its figures, or None.
        env: further environment variables.
    """

    name: str
    command: list[str]
    limit_s: float
    json: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def main() -> int:
    """Run the parts; returns 1 if one of them failed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="folder for record and logs")
    parser.add_argument("--resume", type=Path, help="gpu.json of an earlier call")
    parser.add_argument("--fbgemm", type=Path, help="packed fbgemm_gpu, see above")
    parser.add_argument("--wheels", type=Path, help="wheels to install first")
    parser.add_argument("--limit", type=float, default=1700.0, help="seconds of this call")
    parser.add_argument("--only", default="*", metavar="GLOB", help="parts by name")
    parser.add_argument("--list", action="store_true", help="name the parts and run none")
    parser.add_argument("--quick", action="store_true", help="main cases only")
    args = parser.parse_args()
    if args.list:
        for part in parts(args.quick):
            print(f"{part.name}: at most {part.limit_s:.0f} s")
        return 0
    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    record = Record(args.out, args.resume)
    env = _environment(args)
    for part in parts(args.quick):
        if not fnmatch.fnmatch(part.name, args.only) or (
                record.has(part.name) and part.name not in _REPEATED):
            continue
        left = args.limit - (time.monotonic() - begin)
        if left < 15:
            print(f"{part.name}: left for the next call", flush=True)
            continue
        record.add(part, *_run(part, env, min(left, part.limit_s), args.out / "log.txt"))
    record.write()
    print(summary(record.parts))
    return int(any(p["state"] not in ("ok", "not there") for p in record.parts.values()))


class Record:
    """States and figures of the parts that have run, in `out`/gpu.json and `out`/summary.md."""

    def __init__(self, out: Path, earlier: Path | None) -> None:
        self._out = out
        self.parts: dict[str, dict[str, Any]] = {}
        for path in (earlier, out / "gpu.json"):
            if path is not None and path.exists():
                self.parts.update(json.loads(path.read_text(encoding="utf-8"))["parts"])

    def has(self, name: str) -> bool:
        """Whether a part has succeeded or its command is not installed."""
        return self.parts.get(name, {}).get("state") in ("ok", "not there")

    def add(self, part: Part, state: str, seconds: float, tail: list[str]) -> None:
        """Add the result of a part and write the files."""
        entry = {"state": state, "seconds": round(seconds, 1), "command": part.command,
                 "tail": tail}
        if part.json is not None and part.json.exists():
            entry["record"] = json.loads(part.json.read_text(encoding="utf-8"))
        self.parts[part.name] = entry
        print(f"{part.name}: {state} in {seconds:.0f} s", flush=True)
        self.write()

    def write(self) -> None:
        """Write gpu.json and summary.md, each atomically."""
        text = json.dumps({"benchmark": "gpu", "parts": self.parts}, indent=1)
        for name, content in (("gpu.json", text), ("summary.md", summary(self.parts))):
            part = self._out / f"{name}.part"
            part.write_text(content + "\n", encoding="utf-8")
            part.replace(self._out / name)


def parts(quick: bool) -> Iterator[Part]:
    """The parts, the most informative first."""
    python = [sys.executable]
    tests = "tests/cuda/test_"
    yield Part("machine", [*python, "-c", _MACHINE], 120)
    yield Part("driver", ["nvidia-smi"], 60)
    yield Part("build", [*python, "setup.py", "build_ext", "--inplace"], 420)
    yield Part("tests-first", [*python, *_PYTEST, f"{tests}emulated.py", "-x", "-k",
                               "hosts_bits and 1-striped or hosts_bits and 2-mixed0"], 120)
    # Where a first failure is likeliest, one by one.
    for name, chosen in (("pipeline", "pipeline"), ("two-processes", "mixed-2-"),
                         ("graph", "in_a_graph")):
        yield Part(f"first-{name}", [*python, *_PYTEST, f"{tests}on_gpu.py", "-k", chosen], 120)
    for pooling in (1, 10):
        kernels = WORK / f"kernels-pool{pooling}.json"
        yield Part(f"kernels-pool{pooling}", [*python, "-c", _KERNELS, str(kernels), "8192",
                                              "1000000", "cuda", str(pooling)], 120, kernels)
    bench = [*python, "-m", "oper", "bench"]
    flags = ["--quick"] if quick else []
    sys.path.insert(0, str(ROOT))
    from oper.bench.device.suite import cases

    def case(verb: str, name: str) -> Part:
        out = WORK / f"{name}.json"
        out.unlink(missing_ok=True)
        return Part(name, [*bench, verb, "--device", "cuda", *flags, "--only", name, "--record",
                           str(out)], 150, out)

    names = [c.name for c in cases(quick, "lookup")]
    names.sort(key=lambda n: ("uniform" not in n, "graph" not in n, "host" in n))
    half = [n for n in names if "uniform" in n or "graph" in n]
    yield from (case("lookup", n) for n in half)
    yield Part("tests-ranks", [*python, *_PYTEST, f"{tests}emulated.py", f"{tests}domains.py",
                               "tests/shmem/test_exchange.py"], 300)
    yield Part("tests-processes", [*python, *_PYTEST, f"{tests}on_gpu.py",
                                   f"{tests}domain_processes.py"], 400)
    yield from (case("lookup", n) for n in names if n not in half)
    yield case("train", cases(quick, "train")[0].name)
    # racecheck cannot track launches that overlap.
    for tool, env in (("memcheck", {}), ("racecheck", {"OPER_DEVICE_OVERLAP": "0"})):
        command = [*_SANITIZER, "--tool", tool, "--kernel-name", "kns=oper", *python, *_PYTEST]
        yield Part(tool, [*command, "tests/cuda/test_emulated.py", "-k", _CHOSEN[tool]], 240,
                   env=env)
    yield Part("tests-bench", [*python, *_PYTEST, "tests/bench/test_bench_device.py"], 120)


def _environment(args: argparse.Namespace) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OPER_CUDA": "1", "PYTHONUNBUFFERED": "1",
           "OPER_CUDA_ARCHS": os.environ.get("OPER_CUDA_ARCHS", "90")}
    if args.wheels:
        site = WORK / "site"
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
                        "--upgrade", "--target", str(site),
                        *map(str, sorted(args.wheels.glob("*.whl")))], check=False)
        env["PYTHONPATH"] += f":{site}"
    if args.fbgemm:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from fbgemm_one_arch import unpack

        place, done = WORK / "fbgemm", WORK / "fbgemm.unpacked"
        try:
            if not done.exists():
                unpack(args.fbgemm, place)
                done.touch()
            env["OPER_FBGEMM"] = str(place)
            env["PYTHONPATH"] += f":{place}"  # TorchRec imports it
        except (OSError, ValueError, KeyError, EOFError) as error:
            print(f"no comparison with fbgemm: {error}", file=sys.stderr)
    return env


def _run(part: Part, env: dict[str, str], limit_s: float, log: Path
         ) -> tuple[str, float, list[str]]:
    """Run a part; returns its state, duration (s) and the last lines of its output."""
    if shutil.which(part.command[0]) is None:
        return "not there", 0.0, []
    begin = time.monotonic()
    own = WORK / f"{part.name}.log"
    with open(own, "w", encoding="utf-8") as out:
        process = subprocess.Popen(part.command, cwd=ROOT, env={**env, **part.env}, stdout=out,
                                   stderr=out, start_new_session=True)
        try:
            code = process.wait(limit_s)
            state = "ok" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # including its descendants
            process.wait()
            state = f"out of time after {limit_s:.0f} s"
    lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
    with open(log, "a", encoding="utf-8") as out:
        out.write("\n".join([f"==== {part.name}: {state}", *lines, ""]))
    return state, time.monotonic() - begin, lines[-_TAIL:]


# ---- summary -------------------------------------------------------------------------------------


def _wanted(name: str, entry: dict[str, Any]) -> Iterator[tuple[str, float, str, bool]]:
    """Name, value and target of each figure of a case, and whether the target is met."""
    one_hot = "pool1-" in name and "host" not in name
    least = {"ratio_forward_fbgemm": 1.3 if one_hot else 1.0, "ratio_update_fbgemm": 1.0}
    if "uniform" in name:
        least["forward_fraction_of_floor"] = 0.8
    most = {"location_overhead": 0.05, "peer_overhead": 0.03, "forward_us_replayed": 40.0}
    for sign, limits in ((">=", least), ("<=", most)):
        for key, limit in limits.items():
            if key in entry:
                met = entry[key] >= limit if sign == ">=" else entry[key] <= limit
                yield key, entry[key], f"{sign} {limit}", met


def summary(done: dict[str, dict[str, Any]]) -> str:
    """The results of all parts as Markdown."""
    lines = ["# On a GPU", "", "| part | result | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {p['state']} | {p['seconds']:.0f} |" for name, p in done.items()]
    entries = {name: e for name, p in done.items()
               for e in p.get("record", {}).get("cases", ()) if "verified" in e}
    if entries:
        lines += ["", "| case | right | figure | value | wanted | met |",
                  "|---|---|---|---|---|---|"]
        for name, entry in entries.items():
            right = "yes" if entry["verified"] else "NO"
            figures = list(_wanted(name, entry))
            lines += [f"| {name} | {right} | {key} | {value:.4g} | {wanted} | "
                      f"{'yes' if met else 'NO'} |" for key, value, wanted, met in figures]
            lines += [] if figures else [f"| {name} | {right} | | | | |"]
    for name, p in done.items():
        if p["state"] != "ok" or name.startswith(
                ("tests", "first", "mem", "race", "machine", "kernels")):
            lines += ["", f"## {name}: {p['state']}", "", "```", *p["tail"], "```"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
