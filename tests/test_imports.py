"""The rules on imports, sizes and start-up time, checked on every module of the package."""

import ast
import functools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import oper

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted((ROOT / "oper").rglob("*.py"))
}
NATIVE = [p for p in sorted((ROOT / "csrc").rglob("*")) if p.is_file()]

LEAVES = frozenset({"errors", "ranges", "support", "tables", "stats", "topology", "plan", "rows",
                    "messages"})
ENGINE = LEAVES | {"analysis", "search", "shmem", "integration", "sharding", "inference",
                  "data", "tracing"}
WORKLOADS = ENGINE | {"rl_rec", "rl_rec.models"}
# The packages that each package may import besides itself. Importing a name from `oper`, which
# loads lazily, counts as importing the module that defines it.
PACKAGES: dict[str, frozenset[str]] = {
    **{leaf: LEAVES for leaf in LEAVES},
    "analysis": LEAVES,
    "search": LEAVES,
    "shmem": LEAVES,
    "data": LEAVES | {"analysis"},
    "integration": LEAVES | {"analysis", "search", "shmem"},
    "sharding": LEAVES | {"analysis", "search", "shmem", "integration"},
    "inference": LEAVES | {"search", "shmem", "integration"},
    "tracing": LEAVES | {"shmem", "sharding"},
    "pipeline": LEAVES | {"shmem", "integration", "sharding"},
    "replanning": LEAVES | {"analysis", "search", "sharding", "shmem"},
    "rl_rec": frozenset(ENGINE | {"rl_rec.models"}),
    "rl_rec.models": frozenset({"errors", "ranges"}),
    "train": frozenset(WORKLOADS),
    "serve": frozenset(WORKLOADS | {"train"}),
    "bench": frozenset(WORKLOADS | {"train", "serve", "replanning", "pipeline"}),
    "report": frozenset(WORKLOADS | {"bench", "replanning"}),
    "cli": LEAVES,
    "__main__": frozenset({"cli"}),
}
# Subpackages of a package; each may import those before it.
LAYERS = {"shmem": ("optim", "placement", "group", "memory", "keys", "exchange", "counters",
                    "publication", "device", "replica_groups")}
TORCHREC_PACKAGES = frozenset({"data", "integration", "rl_rec", "rl_rec.models", "train", "serve",
                            "bench"})
# The packages that may import a library that loads slowly or belongs to one package.
LIBRARIES: dict[str, frozenset[str]] = {
    "torchrec": TORCHREC_PACKAGES,
    "fbgemm_gpu": TORCHREC_PACKAGES,
    "cvxpy": frozenset(),  # only tests use it, to formulate the relaxation
    "highspy": frozenset({"search"}),
    "matplotlib": frozenset({"report"}),
    "jinja2": frozenset({"report"}),
}
LEAF_LIBRARIES = frozenset({"numpy"})
MAX_LINES, MAX_FILES = 550, 15  # of a file, and directly in a folder
MAX_PARAMETERS = 7
# Public functions, and torch operators, whose parameters can only be tensors and numbers.
MANY_PARAMETERS = {"oper.sharding.shard", "oper.inference.publish", "oper.search.planner.make_plan",
                   "oper.shmem.compiled.lookup_op", "oper.shmem.compiled.update_op",
                   "oper.shmem.compiled._"}
HEAVY = ("torch", "torchrec", "fbgemm_gpu", "cvxpy", "matplotlib", "highspy", "scipy", "pyarrow")


@functools.cache
def nodes(text: str) -> list[ast.AST]:
    """Return all nodes of a program. Several rules read them, and walking takes most of the time of
    each."""
    return list(ast.walk(ast.parse(text)))


def package_of(module: str) -> str:
    parts = module.split(".")
    if parts[1:3] == ["rl_rec", "models"]:
        return "rl_rec.models"
    return parts[1] if len(parts) > 1 else "oper"


def public_face(name: str) -> list[str]:
    """Return what importing `name` from the package refers to: a module, or the module that defines
    the name."""
    return [] if name == "__version__" else [oper._PUBLIC.get(name, f"oper.{name}")]


def imported_from(module: str, node: ast.ImportFrom) -> str:
    """Return the full name of what follows ``from`` in a statement of `module`."""
    package = module if MODULES.get(module, Path()).name == "__init__.py" else module.rpartition(
        ".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)


def imported(module: str, source: str) -> Iterator[str]:
    """Yield the full names of all modules that `module` imports, anywhere in its text."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name != "oper")
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "oper":
            yield from public_face(node.attr)
        elif isinstance(node, ast.ImportFrom):
            base = imported_from(module, node)
            if base == "oper":
                for alias in node.names:
                    yield from public_face(alias.name)
            else:
                yield base
        elif isinstance(node, ast.Call) and {"import_module", "__import__"} & {
                getattr(node.func, "attr", ""), getattr(node.func, "id", "")}:
            yield from (a.value for a in node.args[:1]
                        if isinstance(a, ast.Constant) and isinstance(a.value, str))


def violations(module: str, source: str) -> list[str]:
    package = package_of(module)
    if package == "oper":  # the lazy face refers to everything for type checkers
        return []
    found = []
    for name in imported(module, source):
        top = name.split(".")[0]
        if top == "oper":
            target = package_of(name)
            if target != package and target not in PACKAGES[package]:
                found.append(f"{module} imports {name}: {package} may not import {target}")
        elif package not in LIBRARIES.get(top, {package}):
            found.append(f"{module} imports {name}, which only {sorted(LIBRARIES[top])} may")
        elif package in LEAVES and top not in sys.stdlib_module_names | LEAF_LIBRARIES:
            found.append(f"{module} imports {name}: a leaf needs the standard library and NumPy")
    return found


def test_every_package_has_a_rule() -> None:
    assert {package_of(m) for m in MODULES} - {"oper"} <= set(PACKAGES)


def test_imports_go_down() -> None:
    assert [v for module, path in MODULES.items()
            for v in violations(module, path.read_text())] == []


BROKEN = [
    ("oper.analysis.x", "from oper.search import make_plan"),
    ("oper.search.x", "def f():\n    import oper.shmem.memory.host_heap"),
    ("oper.shmem.x", "from ..analysis import collect"),
    ("oper.shmem.x", "from oper import collect"),
    ("oper.search.x", "import oper\noper.collect([])"),
    ("oper.search.x", "import importlib\nimportlib.import_module('torchrec')"),
    ("oper.sharding", "import torchrec"),
    ("oper.sharding", "from oper.train import loop"),
    ("oper.data.x", "from oper.shmem.library import load"),
    ("oper.integration.x", "from oper.sharding import shard"),
    ("oper.plan", "from oper.search import x"),
    ("oper.plan", "import torch"),
    ("oper.rl_rec.models.cvae", "from oper.tables import TableSpec"),
    ("oper.train.x", "from oper.bench.demo.demo import run_demo"),
    ("oper.bench.x", "import matplotlib.pyplot"),
]
KEPT = [
    ("oper.analysis.x", "from oper.stats import AccessStats"),
    ("oper.analysis.x", "from oper import __version__, AccessStats"),
    ("oper.data.x", "import oper\nprint(oper.__version__)"),
    ("oper.sharding", "from oper.integration import x\nfrom .shmem import y"),
    ("oper.bench.x", "import torchrec\nimport oper\nfrom oper.train.engines import z"),
]


def test_broken_rules_are_noticed_and_kept_ones_accepted() -> None:
    assert [case for case in BROKEN if len(violations(*case)) != 1] == []
    assert [v for case in KEPT for v in violations(*case)] == []


def internal_imports(module: str, source: str) -> set[str]:
    """Return the modules of the package that `module` imports, also in functions and for type
    checkers only.

    The package's own lazy face is left out, since it refers to everything and is loaded before all.
    """
    found = set(imported(module, source))
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom):
            base = imported_from(module, node)
            # `from package import module` imports the module; its package does not count.
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names & set(MODULES)
            if names <= set(MODULES):
                found.discard(base)
    return found & set(MODULES) - {module, "oper"}


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions and for type checkers count; none is excluded. A CycleError names the
    modules of a cycle."""
    imports = {m: internal_imports(m, p.read_text()) for m, p in MODULES.items()}
    TopologicalSorter(imports).prepare()


def layer_violations(module: str, source: str) -> list[str]:
    parts = module.split(".")
    layers = LAYERS.get(parts[1] if len(parts) > 3 else "", ())
    if not layers:
        return []
    above = layers[layers.index(parts[2]) + 1:]
    return [f"{module} imports {name}" for name in sorted(internal_imports(module, source))
            if name.split(".")[1] == parts[1] and name.split(".")[2] in above]


def test_layers_inside_of_packages() -> None:
    assert [v for m, path in MODULES.items() for v in layer_violations(m, path.read_text())] == []
    assert len(layer_violations("oper.shmem.group.x", "from oper.shmem.exchange import host")) == 1
    assert layer_violations("oper.shmem.exchange.x", "from oper.shmem.group import desync") == []


def test_hidden_imports_are_noticed() -> None:
    hidden = ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
              "    from oper.shmem.tables import ShardedTables\n"
              "def f():\n    from ..group import desync\n    import oper.plan")
    assert internal_imports("oper.shmem.exchange.x", hidden) == {
        "oper.shmem.tables", "oper.shmem.group.desync", "oper.plan"}


def test_files_stay_small() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in [*MODULES.values(), *NATIVE]}
    assert {path: size for path, size in sizes.items() if size > MAX_LINES} == {}


def test_folders_stay_small() -> None:
    counts = Counter(path.parent for path in [*MODULES.values(), *NATIVE])
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_signatures_stay_small() -> None:
    counts = {}
    for module, path in MODULES.items():
        for node in nodes(path.read_text()):
            if isinstance(node, ast.FunctionDef):
                a = node.args
                names = [x.arg for x in a.posonlyargs + a.args + a.kwonlyargs]
                counts[f"{module}.{node.name}", node.lineno] = (
                    len(names) - (names[:1] in (["self"], ["cls"])))
    assert {at: count for at, count in counts.items()
            if count > MAX_PARAMETERS and at[0] not in MANY_PARAMETERS} == {}


def test_import_is_fast_and_light() -> None:
    """Processor time, the best of several processes, since the machine may be busy."""
    code = ("import json, sys, time; t = time.process_time(); import oper; "
            "print(json.dumps([time.process_time() - t, sorted(sys.modules)]))")
    seconds = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                              text=True, check=True)
        took, modules = json.loads(done.stdout)
        seconds.append(took)
        assert not set(HEAVY) & set(modules)
    assert min(seconds) < 0.3


def test_public_names_exist() -> None:
    for name in oper.__all__:
        assert getattr(oper, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'shards'"):
        _ = oper.shards
