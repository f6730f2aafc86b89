"""``python -m tests.sanitizers``: run the native libraries under the compiler's sanitizers.

A copy of the project is built with AddressSanitizer and UndefinedBehaviorSanitizer, or with
ThreadSanitizer, and the tests that use the libraries run in it. With ThreadSanitizer these are the
tests whose ranks are threads of one process, since it does not see memory that processes share.
Before the tests, a planted defect of each kind must be found.

Every test file runs in a process of its own, which the first report ends. All of it takes about an
hour on two busy cores: name `--kind`, a file or a folder for a part, or set `--jobs` on a larger
machine.
"""

import argparse
import filecmp
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAILED, LACKING = 1, 3
REPORT = "sanitizer-report"
# -O1 builds in minutes and keeps memory accesses where the source has them.
COMMON = "-O1 -g1 -fno-omit-frame-pointer -D_GLIBCXX_ASSERTIONS"

PLANTED = """
#include <cstdlib>
#include <thread>
extern "C" int overflow(int n) {
  char* p = static_cast<char*>(std::malloc(16));
  const int found = p[16 + n];
  std::free(p);
  return found;
}
extern "C" int shift(int n) { return 1 << (32 + n); }
extern "C" int add(int n) { return 2147483647 - n + 1; }
extern "C" int race(int n) {
  int shared = n;
  std::thread other([&] { ++shared; });
  ++shared;
  other.join();
  return shared;
}
"""


@dataclass(frozen=True)
class How:
    """Which tests run, the command that starts them, and the number of files at a time."""

    tests: tuple[str, ...]
    through: list[str]
    jobs: int


@dataclass(frozen=True)
class Kind:
    """One way to build and run.

    Attributes:
        flags: flags of the compiler.
        libraries: libraries that must be loaded before all others.
        options: the sanitizers' environment variables, except for the path of the report.
        suppressions: reports that do not concern these libraries.
        planted: functions of `PLANTED`, and the text of the report on each.
        tests: tests that run by default.
        without: those of them that cannot pass under this sanitizer, and why.
    """

    flags: str
    libraries: tuple[str, ...]
    options: dict[str, str]
    suppressions: str
    planted: dict[str, str]
    tests: tuple[str, ...]
    without: dict[str, str]


# Tests that together cover all native code of their package. The other tests run only Python code
# or the same kernels in several processes. Of planning, the tests that enumerate all plans in
# Python are left out: the tests below call the same native functions.
_PLANNING = ("annealing", "branching", "properties")
_TABLES = ("determinism", "exactness", "exchange", "gradients", "heap", "lookup_inputs",
           "message_bits", "migration", "optimizers", "publication", "pull", "quantised_rows",
           "requested_slots", "row_dtypes", "shared_bags", "traffic")
# Tests whose ranks or readers are threads of one process. The others run no threads, or run ranks
# as processes, between which ThreadSanitizer sees no races.
_THREADED = ("exactness", "exchange", "gradients", "heap", "lookup_inputs", "message_bits",
             "migration", "optimizers", "publication", "pull", "requested_slots", "row_dtypes",
             "shared_bags", "threads", "traffic")
_ACCUMULATION = tuple(f"tests/shmem/test_micro_batches.py::test_{name}" for name in (
    "equals_one_batch", "unpooled", "keys_in_another_order_and_optional_weights"))
# Together with AddressSanitizer, UndefinedBehaviorSanitizer always reports to stderr, not to a
# file; so its reports end the process. Leaks are not detected, since Python and torch keep memory
# until the process ends. PYTHONMALLOC=malloc, since Python's own allocator would hide overflows of
# small blocks.
KINDS = {
    "address": Kind(
        # Every defect ends the process. Checks are calls instead of inline code, which makes the
        # kernels compile in two thirds of the time.
        "-fsanitize=address,undefined -fno-sanitize-recover=all "
        "--param asan-instrumentation-with-call-threshold=0",
        ("libasan.so", "libubsan.so"),
        {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
         "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1", "PYTHONMALLOC": "malloc"},
        "",
        {"overflow": "heap-buffer-overflow", "shift": "shift exponent",
         "add": "signed integer overflow"},
        (*(f"tests/search/test_{name}.py" for name in _PLANNING),
         *(f"tests/shmem/test_{name}.py" for name in _TABLES), *_ACCUMULATION,
         "tests/integration/test_deltas.py", "tests/fuzz/test_formats.py"),
        {}),
    "thread": Kind(
        "-fsanitize=thread", ("libtsan.so",),
        {"TSAN_OPTIONS": "report_signal_unsafe=0:second_deadlock_stack=1:history_size=4"},
        # False reports. torch is not compiled with ThreadSanitizer, so the synchronization of its
        # process groups and of OpenMP's threads is not seen (most of these tests run ranks with
        # one thread, without OpenMP). Nor is the lock under which glibc frees thread-local memory.
        "race:c10d::\nrace:at::internal::invoke_parallel\nrace:_dl_deallocate_tls\n",
        {"race": "data race"},
        (*(f"tests/shmem/test_{name}.py" for name in _THREADED), *_ACCUMULATION,
         "tests/shmem/test_determinism.py::test_slow_ranks_change_no_bit",
         "tests/shmem/test_peers.py::test_a_full_send_buffer_on_one_rank_releases_the_others"),
        {f"tests/shmem/test_{name}": "ranks map every segment at one place, for all to write"
         for name in ("heap.py::test_a_rank_can_write_only_its_own_arena",
                      "migration.py::test_failed_and_cancelled_moves_release_their_memory")}
        | {"tests/shmem/test_threads.py::test_a_sharded_module_with_prefetched_batches":
           "evaluation reads rows that are being trained, as it may"}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check the planted defects, test; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(KINDS), action="append",
                        help="only this one (default: all, one after another)")
    parser.add_argument("--folder", type=Path, metavar="DIR",
                        help="build there and keep it; a second run compiles what has changed")
    parser.add_argument("--through", default="", metavar="COMMAND",
                        help="start builds and tests by it, e.g. 'nice -n 19'")
    parser.add_argument("--jobs", type=int, default=1, help="number of test files run in parallel")
    parser.add_argument("--list", action="store_true",
                        help="only print the tests that run, and the exceptions")
    parser.add_argument("tests", nargs="*", metavar="TEST",
                        help="tests instead of the default ones, as pytest takes them")
    args = parser.parse_args(arguments)
    if args.list:
        for name in args.kind or sorted(KINDS):
            print(f"{name}: {' '.join(_files(KINDS[name], args.tests, ROOT))}")
            for test, why in KINDS[name].without.items():
                print(f"  without {test}: {why}")
        return 0
    with tempfile.TemporaryDirectory(prefix="oper-sanitizers-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        how = How(tuple(args.tests), shlex.split(args.through), max(1, args.jobs))
        statuses = [_run(name, folder / name, how) for name in args.kind or sorted(KINDS)]
    return max(statuses)


def _files(kind: Kind, tests: Sequence[str], root: Path) -> list[str]:
    """List the test files, or the tests that were named, in the order in which they run."""
    found: list[str] = []
    for test in tests or kind.tests:
        inside = sorted((root / test).rglob("test_*.py")) if (root / test).is_dir() else []
        found += [str(path.relative_to(root)) for path in inside] or [test]
    return [test for test in found if test not in kind.without]


def _run(name: str, folder: Path, how: How) -> int:
    kind, began = KINDS[name], time.monotonic()
    compiler = os.environ.get("CXX", "g++")
    libraries = [_library(compiler, x) for x in kind.libraries]
    if not all(libraries):
        print(f"{name}: SKIPPED, {compiler} has no {' and '.join(kind.libraries)}")
        return LACKING
    copy_project(folder)
    _say(name, f"building in {folder}")
    build = {"CXX": str(_wrapper(compiler, kind, folder)), "OPER_CUDA": "0"}
    subprocess.run([*how.through, sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
                   cwd=folder, env=os.environ | build, check=True)
    reports = folder / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    environment = _environment(kind, [str(x) for x in libraries], folder)
    missed = [what for what, text in kind.planted.items()
              if not _finds(what, text, f"{compiler} {kind.flags}", folder, environment)]
    if missed:
        print(f"{name}: FAILED, planted defects were not found: {missed}")
        return FAILED
    _say(name, f"built and planted defects found after {time.monotonic() - began:.0f} s")
    without = [f"--deselect={test}" for test in kind.without]

    # Set for Python only, since the command that starts it may not work with a preloaded library.
    given = [f"{k}={v}" for k, v in environment.items()] + [f"PYTHONPATH={folder}"]

    def one(test: str) -> str:
        start = time.monotonic()
        # With -v, the output shows which test was running when the process ended.
        done = subprocess.run(
            [*how.through, "env", *given, sys.executable, "-m", "pytest", "-v", "-p",
             "no:cacheprovider", "--capture=sys", *without, test],
            cwd=folder, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace")
        if done.returncode:
            print(done.stdout, flush=True)
        what = "FAILED: " if done.returncode else ""
        last = (done.stdout.strip().splitlines() or ["nothing"])[-1].strip("= ")
        _say(name, f"{test}: {what}{last} ({time.monotonic() - start:.0f} s)")
        return what

    with ThreadPoolExecutor(how.jobs) as pool:
        said = list(pool.map(one, _files(kind, how.tests, folder)))
    found = sorted(reports.glob(f"{REPORT}*"))
    for report in found:
        print(report.read_text(errors="replace")[:6000])
    failed = sum(map(bool, said))
    print(f"{name}: {len(said)} files of tests, {failed} failed, {len(found)} reports, "
          f"{time.monotonic() - began:.0f} s")
    return FAILED if failed or found else 0


def _wrapper(compiler: str, kind: Kind, folder: Path) -> Path:
    """Make a compiler wrapper that adds the kind's flags after the project's, since the last -O
    counts."""
    found = folder / "compiler"
    text = f'#!/bin/sh\nexec {compiler} "$@" {kind.flags} {COMMON}\n'
    if not found.exists() or found.read_text() != text:
        found.write_text(text)
        found.chmod(0o755)
        shutil.rmtree(folder / "build" / "objects", ignore_errors=True)
    return found


def copy_project(folder: Path) -> None:
    """Copy what git tracks or would track, except files that are already there, so that a second
    build is short."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, os.fsdecode(listed).split("\0")):
        source, target = ROOT / name, folder / name
        if not source.is_file():
            continue
        # Compare contents: after a switch of branches, unchanged files may have newer times.
        if target.is_file() and filecmp.cmp(source, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def _library(compiler: str, name: str) -> Path | None:
    """Return the path of a runtime library of the compiler."""
    command = [*shlex.split(compiler), f"-print-file-name={name}"]
    found = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return found if found.is_absolute() else None


def _environment(kind: Kind, libraries: Sequence[str], folder: Path) -> dict[str, str]:
    suppressions = folder / "suppressions.txt"
    suppressions.write_text(kind.suppressions)
    more = f":log_path={folder / 'reports' / REPORT}"
    if kind.suppressions:
        more += f":suppressions={suppressions}:print_suppressions=0"
    options = {name: value + (more if name.endswith("_OPTIONS") else "")
               for name, value in kind.options.items()}
    return options | {"LD_PRELOAD": " ".join(libraries), "OMP_NUM_THREADS": "1"}


def _finds(what: str, text: str, compiler: str, folder: Path, environment: dict[str, str]) -> bool:
    """Whether a planted defect is reported; its report is then removed."""
    source, library = folder / "planted.cpp", folder / "planted.so"
    source.write_text(PLANTED)
    subprocess.run([*shlex.split(compiler), "-g1", "-O0", "-fPIC", "-shared", str(source), "-o",
                    str(library)], check=True)
    program = f"import ctypes; ctypes.CDLL({str(library)!r}).{what}(0)"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | environment,
                          check=False, capture_output=True, text=True)
    reports = list((folder / "reports").glob(f"{REPORT}*"))
    said = [done.stderr, *(report.read_text(errors="replace") for report in reports)]
    for report in reports:
        report.unlink()
    return done.returncode != 0 and any(text in s for s in said)


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
