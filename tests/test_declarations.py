"""Imports agree with declarations in ``pyproject.toml``; versions, targets, listed tests exist."""

import ast
import functools
import re
import sys
import tomllib
from pathlib import Path

import oper
from tests.schedule import ALONE, NIGHTLY, RANDOM_PROBLEMS, SAMPLED
from tests.support import ROOT
from tests.test_imports import MODULES, nodes

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The extras that a module's imports may come from, besides the core's dependencies: those of the
# longest prefix of its name. Every one of them must declare all that the module imports.
EXTRAS: dict[str, tuple[str, ...]] = {
    "oper.integration": ("torchrec",),
    "oper.train": ("torchrec",),
    "oper.rl_rec": ("torchrec",),
    "oper.rl_rec.simulation.environment": ("rl",),
    "oper.rl_rec.simulation.minari_logs": ("rl",),
    "oper.serve": ("serve",),
    "oper.serve.model": ("torchrec",),
    "oper.report": ("report",),
    "oper.data.loading.kjt": ("torchrec",),
    "oper.data.preprocessing.workers": ("data",),
    "oper.data.reading.cuts": ("data",),
    "oper.data.reading.workbook": ("data",),
    "oper.search.peers": ("bench", "report"),
    "oper.bench": ("bench",),
    "tests": ("test",),
    "tests.search.oracle": ("plan",),
    "tests.fuzz.__main__": ("fuzz",),
    "examples": ("torchrec",),
}
# Nothing imports these: plugins of pytest, programs, and two packages that `moto_server` needs (its
# own extra would install about fifty).
TOOLS = {"clang-format", "codespell", "flask", "flask-cors", "mkdocs", "mkdocs-material",
         "mkdocstrings", "moto", "mypy", "pytest-timeout", "pytest-xdist", "ruff"}
# Distributions whose names are not those of their modules.
DISTRIBUTIONS = {"mlperf_loadgen": "mlcommons-loadgen"}


def third_party(text: str, optional: bool = False) -> set[str]:
    """Return the distributions that a program imports or looks for, everywhere in it: in functions,
    for type checkers only, and in programs that it contains as text.

    With `optional`, return only those without which a test is skipped.
    """
    calls = {"import_module", "__import__", "find_spec", *(["importorskip"] if optional else [])}
    names: set[str] = set()
    for node in nodes(text):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and calls & {
                getattr(node.func, "attr", ""), getattr(node.func, "id", "")}:
            names.update(a.value for a in node.args[:1]
                         if isinstance(a, ast.Constant) and isinstance(a.value, str))
        elif isinstance(node, ast.Constant) and re.search(r"^import ", str(node.value), re.M):
            try:
                names |= third_party(str(node.value), optional)
            except SyntaxError:  # prose
                continue
    tops = {n.split(".")[0] for n in names} - sys.stdlib_module_names - OWN
    return {DISTRIBUTIONS.get(top, top).replace("_", "-") for top in tops}


def sources() -> dict[str, Path]:
    others = [p for folder in ("tests", "examples") for p in sorted((ROOT / folder).rglob("*.py"))]
    return MODULES | {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in others}


# Tests name modules of their folder without the package.
OWN = {"oper", "tests", *(p.stem for p in ROOT.glob("tests/**/*.py")),
       *(p.stem for p in ROOT.glob("benchmarks/*.py"))}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", r)[0].lower() for r in requirements} - {"oper"}


CORE = names(PROJECT["dependencies"])
DIRECT = {extra: names(r) for extra, r in PROJECT["optional-dependencies"].items()}


def including(extra: str) -> set[str]:
    """Return the extra and all extras that it includes."""
    parts = re.findall(r"oper\[(.*?)\]", " ".join(PROJECT["optional-dependencies"][extra]))
    return {extra}.union(*(including(e) for part in parts for e in part.split(",")))


def extras_of(module: str) -> tuple[str, ...]:
    prefixes = [p for p in EXTRAS if f"{module}.".startswith(f"{p}.")]
    return EXTRAS[max(prefixes, key=len)] if prefixes else ()


@functools.cache
def uses(optional: bool = False) -> list[tuple[str, str]]:
    """List every module with every distribution that it uses."""
    return [(module, name) for module, path in sources().items()
            for name in sorted(third_party(path.read_text(encoding="utf-8"), optional))]


def test_every_import_is_declared() -> None:
    undeclared = []
    for module, name in uses():
        sets = [set().union(*(DIRECT[e] for e in including(extra))) for extra in extras_of(module)]
        if name not in CORE and not (sets and all(name in s for s in sets)):
            undeclared.append(f"{module} imports {name}: declare it in "
                              f"{' and '.join(extras_of(module)) or 'dependencies'}")
    assert undeclared == []


def test_every_declaration_is_used() -> None:
    used: dict[str, set[str]] = {extra: set() for extra in DIRECT}
    used["test"] = {name for _, name in uses()}  # the tests run all modules
    for module, name in uses(optional=True):
        for extra in {part for e in extras_of(module) for part in including(e)}:
            used[extra].add(name)
    assert CORE - {name for module, name in uses() if module in MODULES} == set()
    assert {extra: rest for extra, wanted in DIRECT.items()
            if (rest := wanted - used[extra] - TOOLS)} == {}
    assert [p for p in EXTRAS if not any(f"{m}.".startswith(f"{p}.") for m in sources())] == []


def test_errors_and_pages_name_extras_that_exist() -> None:
    pages = [*MODULES.values(), *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    named = {e.strip() for p in pages
             for part in re.findall(r"oper\[([a-z, ]+)\]", p.read_text(encoding="utf-8"))
             for e in part.split(",")}
    assert named
    assert named <= set(DIRECT)


def test_what_the_tests_need_is_pinned() -> None:
    pinned = {name for page in ROOT.glob("requirements/*.txt")
              for name in names(re.findall(r"^[\w-]\S*==.*$", page.read_text(), re.M))}
    wanted = CORE.union(*(DIRECT[e] for e in including("dev"))) - {"torch"}
    assert {n.replace("_", "-") for n in pinned} >= wanted


def test_one_version_everywhere() -> None:
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert cited == [oper.__version__] == released[:1]


def test_workflows_and_hooks_call_what_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = page.read_text(encoding="utf-8")
        called = {w for line in re.findall(r"run: make ([\w ${}.=-]+)", text)
                  for w in re.sub(r"\$\{\{.*?\}\}", "", line).split() if "=" not in w}
        for listed in re.findall(r"target: \[(.*?)\]", text):
            called |= set(listed.split(", "))
        assert called
        assert called <= targets


# ---- tests/schedule.py ---------------------------------------------------------------------------


def test_listed_tests_exist() -> None:
    assert len({n.test for n in NIGHTLY}) == len(NIGHTLY)
    assert all((ROOT / path).exists() for path in ALONE)
    for test in (*(n.test for n in NIGHTLY), *SAMPLED, *RANDOM_PROBLEMS):
        path, _, name = test.partition("::")
        assert not name or re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), test
