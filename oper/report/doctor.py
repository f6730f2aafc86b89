"""``oper doctor``: reports on the installation and the machine, and how to get missing parts."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oper import __version__
from oper.errors import OperError
from oper.support import kernel
from oper.support.environment import VARIABLES, problems
from oper.support.versions import version_of
from oper.tables import format_bytes

ENVIRONMENT = {name: variable.about for name, variable in VARIABLES.items()}

_REQUIRED = {"torch": "pip install 'torch>=2.11'", "numpy": "pip install numpy",
             "pyarrow": "pip install pyarrow", "highspy": "pip install highspy",
             "tqdm": "pip install tqdm"}
_OPTIONAL = {  # module: (distributions that provide it, what it is for, how to get it)
    "torchrec": (("torchrec",), "TorchRec models, oper train",
                 "make setup, or pip install --no-deps torchrec"),
    "fbgemm_gpu": (("fbgemm-gpu-cpu", "fbgemm-gpu"), "torchrec",
                   "pip install fbgemm-gpu-cpu (fbgemm-gpu on a GPU machine)"),
    "cvxpy": (("cvxpy",), "tests of the planner", "pip install 'oper[plan]'"),
    "scipy": (("scipy",), "baselines on the page of a plan", "pip install 'oper[report]'"),
    "matplotlib": (("matplotlib",), "reports", "pip install 'oper[report]'"),
    "jinja2": (("jinja2",), "reports", "pip install 'oper[report]'"),
    "httptools": (("httptools",), "oper serve", "pip install 'oper[serve]'"),
    "mlperf_loadgen": (("mlcommons_loadgen",), "oper bench serve", "pip install 'oper[bench]'"),
}


@dataclass(slots=True)
class Report:
    """The contents of the report that ``oper doctor`` prints.

    Attributes:
        versions: by package; None = not installed.
        libraries: by library, ``"loads"``, ``"not built"`` or the error.
        machine: facts about processor, memory and pages.
        gpus: one line per device.
        environment: the environment variables read by OPER that are set.
        problems: problems that prevent use of the CPU path, including invalid environment
            variables, each with its remedy.
        hints: missing optional parts, each with its remedy.
    """

    versions: dict[str, str | None] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_doctor(args: argparse.Namespace) -> int:
    """Print a report; returns 0 if everything that the CPU path needs is available, else 1."""
    report = examine()
    print(json.dumps(asdict(report), indent=2) if args.json else to_text(report))
    return 1 if report.problems else 0


def examine() -> Report:
    """Examine packages, libraries and the machine."""
    report = Report(environment={k: os.environ[k] for k in ENVIRONMENT if k in os.environ},
                    problems=list(problems()))
    _examine_packages(report)
    _examine_libraries(report)
    report.machine = _machine()
    report.machine["heap pages"] = "unknown"
    if report.libraries["host"] == "loads":
        try:
            report.machine["heap pages"] = page_kind()
        except (OperError, OSError, RuntimeError) as error:
            report.problems.append(f"no shared memory between processes: {error}; allow "
                                   "memfd_create and mmap in this container")
    report.gpus = _gpus()
    if report.gpus and report.libraries["cuda"] != "loads":
        report.hints.append("the GPU library is not in use: install a CUDA build of torch and the "
                            "CUDA toolkit, then run make setup")
    return report


def to_text(report: Report) -> str:
    """Format a report as text."""
    def block(title: str, rows: dict[str, Any]) -> list[str]:
        width = max((len(k) for k in rows), default=0)
        return [title, *(f"  {k:<{width}}  {v}" for k, v in rows.items())]

    lines = block("versions", {k: v or "not installed" for k, v in report.versions.items()})
    lines += block("libraries", report.libraries)
    lines += block("machine", report.machine)
    lines += ["GPUs", *(f"  {g}" for g in report.gpus or ["none"])]
    lines += block("environment", {k: f"{report.environment.get(k, 'not set')} ({about})"
                                   for k, about in ENVIRONMENT.items()})
    lines += ["missing", *(f"  {p}" for p in report.problems)]
    lines += [f"  optional: {h}" for h in report.hints]
    if not report.problems:
        lines.append("  nothing that the CPU path needs")
    return "\n".join(lines)


def _failure(module: str) -> str | None:
    """Return the reason why `module` cannot be imported; None if it can."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(module)
    except Exception as error:  # a damaged package may raise anything
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def _examine_packages(report: Report) -> None:
    report.versions = {"oper": __version__, "python": platform.python_version()}
    if sys.version_info < (3, 11):  # noqa: UP036  (a checkout may be run by any interpreter)
        report.problems.append(f"python={platform.python_version()}, expected >= 3.11")
    for module, command in _REQUIRED.items():
        report.versions[module] = version_of(module)
        if (why := _failure(module)) is not None:
            report.problems.append(f"{module}: {why}; {command}")
    torch_version = report.versions.get("torch")
    if torch_version and tuple(map(int, torch_version.split(".")[:2])) < (2, 11):
        report.problems.append(f"torch={torch_version}, expected >= 2.11; {_REQUIRED['torch']}")
    for module, (distributions, purpose, command) in _OPTIONAL.items():
        report.versions[module] = version_of(*distributions)
        if report.versions[module] is None:
            report.hints.append(f"{module} is not installed (needed for {purpose}); {command}")
        elif module in ("torchrec", "fbgemm_gpu") and (why := _failure(module)) is not None:
            report.hints.append(f"{module} does not import ({why}); {command}")


def _examine_libraries(report: Report) -> None:
    rebuild = "run make setup, or python setup.py build_ext --inplace"
    for name, must in (("search", True), ("host", True), ("cuda", False)):
        path = Path(__file__).resolve().parents[1] / "_lib" / f"liboper_{name}.so"
        if not path.exists():
            state = "not built"
        else:
            state = "loads" if (why := _load_failure(name, path)) is None else why
        report.libraries[name] = state
        if must and state != "loads":
            report.problems.append(f"the {name} library: {state}; {rebuild}")
    if report.libraries["host"] == "loads":
        import torch

        from oper.shmem.library import check_kernels

        report.libraries["host kernels"] = torch.ops.oper.kernel_name()
        try:
            check_kernels()
        except OperError as error:
            report.problems.append(str(error))


def _load_failure(name: str, path: Path) -> str | None:
    try:
        if name == "host":
            from oper.shmem.library import register

            register()
            return None
        if name == "cuda":
            import torch

            if torch.version.cuda is None:
                return "built, but torch has no CUDA"
        ctypes.CDLL(str(path))
    except (OperError, OSError, ImportError) as error:
        return str(error)
    return None


def _machine() -> dict[str, Any]:
    processor = kernel.pairs("/proc/cpuinfo")
    flags = set(processor.get("flags", "").split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    vectors = [f for f in ("avx2", "avx512f", "avx512bw", "avx512vl") if f in flags]
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor.get("model name", platform.machine()),
        "cores": f"{usable} usable of {os.cpu_count()}",
        "vector flags": " ".join(vectors) or "none",
        "memory": f"{format_bytes(kernel.memory_bytes('MemTotal'))}, "
                  f"{format_bytes(kernel.memory_bytes('MemAvailable'))} available",
        "memory limit": _limit(),
        "huge page pool": f"{kernel.read('/proc/sys/vm/nr_hugepages') or '?'} of 2 MiB",
        "huge pages, private": kernel.huge_pages("enabled") or "?",
        "huge pages, shared": kernel.huge_pages("shmem_enabled") or "?",
        "nvcc": _nvcc() or "not found",
    }


def page_kind() -> str:
    """Return the kind of memory pages that a shared arena gets here, tested with 8 MiB.

    The host library must be loaded.
    """
    import torch

    from oper.shmem.group.groups import SingleGroup
    from oper.shmem.memory.host_heap import HostHeap

    size = 8 << 20
    with contextlib.closing(HostHeap(SingleGroup(), [size])) as heap:
        torch.ops.oper.segment_bytes(heap.addresses[0], size).fill_(1)
        heap.collapse([size], lambda: None)
        return "2 MiB (collapsed when rows are loaded)" if heap.page_kind == "2MiB" else "4 KiB"


def _gpus() -> list[str]:
    with contextlib.suppress(Exception):
        import torch

        if torch.cuda.is_available():
            found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
            return [f"{p.name}, {format_bytes(p.total_memory)}" for p in found]
    # A CPU build of torch reports no device, but the driver may.
    return _lines(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])


def _nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    for nvcc in [*(str(Path(h) / "bin" / "nvcc") for h in homes if h), shutil.which("nvcc")]:
        if nvcc and os.access(nvcc, os.X_OK):
            release = [x for x in _lines([nvcc, "--version"]) if "release" in x]
            if release:
                return f"{nvcc} ({release[0].split(',')[-1].strip()})"
    return None


def _lines(command: list[str]) -> list[str]:
    """Return the lines that a command prints; none if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return []
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip().splitlines() if done.returncode == 0 else []
    return []


def _limit() -> str:
    """Return the memory limit of the control group, which may be below the machine's memory."""
    most = kernel.memory_limit()
    return "none" if most is None else format_bytes(most)
