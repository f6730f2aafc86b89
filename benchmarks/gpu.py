"""Everything about the device back end that a machine with a GPU can show, in one command.

    python benchmarks/gpu.py --out DIR [--fbgemm FOLDER] [--wheels FOLDER] [--limit SECONDS]

Builds the libraries for this GPU, runs the tests of tests/cuda on it (equality with the host back
end, processes through symmetric and virtual memory, a killed rank, graphs, rows in host memory,
the same bits in every run), looks for races and bad accesses with compute-sanitizer where there
is one, and records `oper bench lookup` and `oper bench train` with `--device cuda`. A step that
fails does not stop the others. DIR gets a log per step, lookup.json, train.json and summary.md.

FOLDER of --fbgemm is what benchmarks/fbgemm_one_arch.py has packed; without it, or an installed
fbgemm_gpu, there is no comparison with fbgemm. --wheels installs wheels that the machine lacks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A small training run, under a tool that slows kernels down many times.
_SMALL = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/test_emulated.py", "-k",
          "test_training_gives_the_hosts_bits and 2-mixed0 or test_push and True-2"]


def main() -> int:
    """Run the steps; 1 when one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="folder for logs and records")
    parser.add_argument("--fbgemm", type=Path, help="packed fbgemm_gpu, see above")
    parser.add_argument("--wheels", type=Path, help="wheels to install first")
    parser.add_argument("--limit", type=float, default=1500.0,
                        help="seconds for all steps; the later ones are left out")
    parser.add_argument("--quick", action="store_true", help="main cases only")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    env = _environment(args)
    end = time.monotonic() + args.limit
    done = []
    for name, command in _steps(args).items():
        left = end - time.monotonic()
        if left < 5:
            done.append((name, "left out", 0.0))
            continue
        begin = time.monotonic()
        state = _run(name, command, env, left, args.out)
        done.append((name, state, time.monotonic() - begin))
        print(f"{name}: {state} in {done[-1][2]:.0f} s", flush=True)
    _summarize(args.out, done)
    return int(any(state not in ("ok", "not there") for _, state, _ in done))


def _environment(args: argparse.Namespace) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OPER_CUDA": "1", "PYTHONUNBUFFERED": "1",
           "OPER_CUDA_ARCHS": os.environ.get("OPER_CUDA_ARCHS", "90")}
    if args.wheels:
        site = args.out / "site"
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
                        "--target", str(site), *map(str, sorted(args.wheels.glob("*.whl")))],
                       check=True)
        env["PYTHONPATH"] += f":{site}"
    if args.fbgemm:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        from fbgemm_one_arch import unpack

        env["OPER_FBGEMM"] = str(unpack(args.fbgemm, args.out / "fbgemm"))
    return env


def _steps(args: argparse.Namespace) -> dict[str, list[str]]:
    python = [sys.executable]
    bench = [*python, "-m", "oper", "bench"]
    quick = ["--quick"] if args.quick else []
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all"]
    return {
        "machine": ["nvidia-smi"],
        "build": [*python, "setup.py", "build_ext", "--inplace"],
        "tests": [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda",
                  "tests/bench/test_bench_device.py", "--deselect",
                  "tests/cuda/test_compiled.py"],
        "lookup": [*bench, "lookup", "--device", "cuda", *quick, "--json",
                   str(args.out / "lookup.json")],
        "train": [*bench, "train", "--device", "cuda", *quick, "--json",
                  str(args.out / "train.json")],
        "memcheck": [*sanitizer, "--tool", "memcheck", *python, *_SMALL],
        "racecheck": [*sanitizer, "--tool", "racecheck", *python, *_SMALL],
    }


def _run(name: str, command: list[str], env: dict[str, str], limit: float, out: Path) -> str:
    if shutil.which(command[0]) is None:
        return "not there"
    with open(out / f"{name}.log", "w", encoding="utf-8") as log:
        try:
            code = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log,
                                  timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            return "out of time"
    return "ok" if code == 0 else f"failed with {code}"


def _summarize(out: Path, done: list[tuple[str, str, float]]) -> None:
    lines = ["# On a GPU", "", "| step | result | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {state} | {seconds:.0f} |" for name, state, seconds in done]
    for name in ("tests", "memcheck", "racecheck", "lookup", "train"):
        log = out / f"{name}.log"
        if log.exists():
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-60:]
            lines += ["", f"## {name}", "", "```", *tail, "```"]
    text = "\n".join(lines) + "\n"
    (out / "summary.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
