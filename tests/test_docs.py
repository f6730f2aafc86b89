"""Code in README and the documents runs as printed; links and generated pages are right.

The blocks of a page run in their order in one folder: Python in one interpreter, commands in one
shell. A block with the name of a file as its title becomes that file. A block that is not run says
why in its first line: "# Not run by the tests: ...". Pages other than tutorials begin in a folder
with the files of `WORKSPACE`.
"""

import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from oper import cli
from oper.data import SyntheticLog, write_synthetic_log
from oper.support.environment import VARIABLES
from oper.train.config import TABLE_OPTIMIZERS
from tests.support import ROOT, run_here

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
SKIPPED = "# Not run by the tests: "
PYTHON, SHELL = ("python",), ("console", "sh", "bash")
FILES = ("toml", "json", "yaml")  # data; written to a file if the title names one
TIMEOUT_S = 300
# Commands that make the files which pages other than tutorials expect in their folder.
WORKSPACE = """
preprocess criteo-kaggle train.txt -o data
analyze data -o stats.npz
plan stats.npz --topology h100-8 --dim 16 -o plan.json
plan stats.npz --topology h100-8 --dim 16 --allow striped,pull -o other.json
train examples/train.toml --data data --stats stats.npz --out runs/dlrm --max-steps 4 \
    --batch-size 256
"""
# Names that a page's Python code uses without defining them.
MODEL = """
import torch, oper
from torch import nn
def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(1000, 16, mode="sum"), nn.Linear(16, 1))
model = make()
batches = recent_batches = [{"0": (torch.randint(1000, (64,)), torch.ones(64, dtype=torch.int64))}
                            for _ in range(4)]
stats = oper.collect(batches, model)
topology = oper.Topology.this_host(1)
"""


class Block(NamedTuple):
    """A fenced block: where it begins, its language, its title, its text."""

    line: int
    language: str
    title: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^(?P<q>`{3,})(\w*)([^\n]*)\n(.*?)^(?P=q)$", text, re.S | re.M):
        title = re.search(r'title="(.*?)"', found[3])
        yield Block(text.count("\n", 0, found.start()) + 1, found[2], title[1] if title else "",
                    found[4])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runs(block: Block) -> bool:
    return block.language in PYTHON + SHELL and not block.text.startswith(SKIPPED)


# ---- running ------------------------------------------------------------------------------------


class Shell:
    """A shell for all commands of a page, whose processes and variables remain for later blocks."""

    def __init__(self, folder: Path) -> None:
        tools = folder.parent / "bin"
        tools.mkdir(exist_ok=True)
        for tool, words in (("oper", "-m oper"), ("torchrun", "-m torch.distributed.run"),
                            ("python", "")):
            (tools / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (tools / tool).chmod(0o755)
        environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH":
                       str(ROOT), "OMP_NUM_THREADS": "1", "no_proxy": "localhost,127.0.0.1"}
        self._bash = subprocess.Popen(
            ["bash"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True)

    def run(self, text: str) -> str:
        """Run commands, each of which must succeed; return their output."""
        return self._answer(f"set -e\n{text}\nset +e; echo '<done>'\n", text)

    def _answer(self, words: str, text: str) -> str:
        """Return what is printed after `words`, which run `text`, until ``<done>``."""
        assert self._bash.stdin and self._bash.stdout
        timer = threading.Timer(TIMEOUT_S, self.close)
        timer.start()
        try:
            self._bash.stdin.write(words)
            self._bash.stdin.flush()
            lines = []
            for line in self._bash.stdout:
                if line.rstrip("\n").endswith("<done>"):
                    return "".join([*lines, line.rpartition("<done>")[0]])
                lines.append(line)
        finally:
            timer.cancel()
        pytest.fail(f"the block\n{text}\nfailed:\n{''.join(lines)}")

    def close(self) -> None:
        """End the shell and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()


PROMPT = """
import sys, traceback
names = {"__name__": "__docs__"}
for size in iter(sys.stdin.readline, ""):
    text = sys.stdin.read(int(size))
    try:
        exec(compile(text, "<block>", "exec"), names)
        print("<done>", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
"""


class Interpreter(Shell):
    """A Python process for all Python blocks of a page."""

    def __init__(self, folder: Path) -> None:
        (folder.parent / "prompt.py").write_text(PROMPT)
        super().__init__(folder)
        assert self._bash.stdin
        self._bash.stdin.write(f"exec python {folder.parent / 'prompt.py'}\n")

    def run(self, text: str) -> str:
        return self._answer(f"{len(text)}\n{text}", text)


@contextmanager
def opened(kind: type[Shell], folder: Path) -> Iterator[Shell]:
    shell = kind(folder)
    try:
        yield shell
    finally:
        shell.close()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "workspace"
    shutil.copytree(ROOT / "examples", folder / "examples")
    write_synthetic_log(folder / "train.txt",
                        SyntheticLog(4_000, 3, tuple(5 + 37 * k for k in range(26))))
    rng = random.Random(0)
    clicks = [f"{1700000000 + 60 * k},u{rng.randrange(90)},i{rng.randrange(70)},"
              f"a|b{k % 5},{rng.randrange(2)}" for k in range(4000)]
    (folder / "clicks.csv").write_text("\n".join(["ts,user,item,tags,clicked", *clicks, ""]))
    with chdir(folder):
        for command in WORKSPACE.replace("\\\n", "").strip().splitlines():
            done = run_here(*command.split())
            assert done.returncode == 0, done.stderr
    return folder


def run_page(page: Path, folder: Path) -> dict[int, str]:
    """Run the blocks of a page in `folder`; return the output of each by its line."""
    printed = {}
    with opened(Shell, folder) as shell, opened(Interpreter, folder) as interpreter:
        if "tutorials" not in page.parts and page.name != "README.md":
            interpreter.run(MODEL)
        for block in blocks(page):
            if re.fullmatch(r"[\w.-]+\.(py|toml|json)", block.title):
                (folder / block.title).write_text(block.text)
            elif runs(block):
                kind = interpreter if block.language in PYTHON else shell
                printed[block.line] = kind.run(block.text)
    return printed


@pytest.mark.parametrize("page", [
    pytest.param(p, id=name_of(p)) for p in PAGES if any(runs(b) for b in blocks(p))])
def test_blocks_run(page: Path, workspace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    if "tutorials" in page.parts:
        folder.mkdir()
    else:
        shutil.copytree(workspace, folder)
    printed = run_page(page, folder)
    if page.name == "ddp-dlrm.md":
        losses = [re.findall(r"loss ([\d.]+)", text) for text in printed.values()]
        assert len(losses[0]) == 4 and losses[0] == losses[1]
        (shown,) = [b.text for b in blocks(page) if b.language == "text"]
        assert re.findall(r"step +(\d+)", shown) == ["0", "5", "10", "15"]
    if page.name == "log-to-server.md":
        answers = [text for text in printed.values() if '"outputs"' in text]
        assert len(answers) == 1 and '"shape": [2]' in answers[0]


def test_blocks_that_are_not_run_state_a_reason() -> None:
    for page in PAGES:
        for block in blocks(page):
            where = f"{name_of(page)}:{block.line}"
            assert block.language, f"{where}: name the language of the block"
            known = (*PYTHON, *SHELL, *FILES, "text")
            assert block.language in known, f"{where}: {block.language}"
            if block.text.startswith(SKIPPED.rstrip()):
                assert len(block.text.splitlines()[0]) > len(SKIPPED) + 5, where
        indented = re.search(r"^ {4}(oper|python|torchrun|make|pip|from|import) .*",
                             re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.M)
        assert indented is None, f"{name_of(page)}: a block without a fence is not run: {indented}"


def test_a_failing_block_fails(tmp_path: Path) -> None:
    with opened(Shell, tmp_path) as shell:
        assert shell.run("x=3") == "" and shell.run("echo $x") == "3\n"
        with pytest.raises(pytest.fail.Exception, match="failed"):
            shell.run("false\necho hidden")
    with opened(Interpreter, tmp_path) as interpreter:
        interpreter.run("x = 3")
        assert interpreter.run("print(x)") == "3\n"
        with pytest.raises(pytest.fail.Exception, match="ZeroDivisionError"):
            interpreter.run("x / 0")


# ---- names, links, generated pages ---------------------------------------------------------------


def test_the_commands_exist() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language in SHELL:
                verbs = re.findall(r"^oper ([a-z]\w+)", block.text, re.M)
                assert set(verbs) <= set(cli.COMMANDS), name_of(page)


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    named = {t for page in PAGES
             for t in re.findall(r"(?:`|^)make ([\w-]+)", page.read_text(), re.M)}
    assert {"demo", "test", "setup"} <= named
    assert named - {"again"} <= targets


def test_links_have_targets() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists() or made(page, link), f"{page} links to {link}"


def made(page: Path, link: str) -> bool:
    """Whether the link leads to a page that is made from the code."""
    target = os.path.relpath(page.parent / link, ROOT / "docs")
    return target in GENERATE["GENERATED"] and "docs" in page.parts


GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:", 1)[1]
    listed = re.findall(r"([\w/-]+\.md)", text)
    there = [str(p.relative_to(ROOT / "docs")) for p in ROOT.glob("docs/**/*.md")]
    assert sorted(listed) == sorted([*there, *GENERATE["GENERATED"], *GENERATE["COPIED"].values()])


def test_generated_pages_are_complete() -> None:
    pages = dict(GENERATE["pages"]())
    for verb in cli.COMMANDS:
        assert f"\n## oper {verb}\n" in pages["reference/cli.md"]
    assert "`--latency-bound MS`" in pages["reference/cli.md"]
    assert "`--device cpu, cuda`" in pages["reference/cli.md"]  # of one benchmark
    for name in VARIABLES:
        assert f"| `{name}` |" in pages["reference/environment.md"]
    assert '`[model]` with `name = "cadvae"`' in pages["reference/configuration.md"]
    assert "| `tables_lr` | `0.02` |" in pages["reference/configuration.md"]
    assert all(f'`"{name}"`' in pages["reference/configuration.md"] for name in TABLE_OPTIMIZERS)
    assert "| `oper_requests_total` | counter |" in pages["reference/metrics.md"]
    assert "::: oper.sharding.shard" in pages["reference/api.md"]


def test_links_of_copied_pages_are_those_of_the_site() -> None:
    text = "[a](../docs/x/y.md#z---y) [b](README.md) [c](lookup.json) [d](https://e.f)"
    assert GENERATE["rewritten"](text, "benchmarks/README.md", "project/benchmarks.md") == (
        "[a](../x/y.md#z-y) [b](benchmarks.md) c (`benchmarks/lookup.json`) [d](https://e.f)")


# ---- notebooks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/notebooks/*.ipynb")),
                         ids=lambda p: p.stem)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert len(cells) > 2 and not any(c.get("outputs") for c in notebook["cells"])
    folder = tmp_path / "notebook"
    folder.mkdir()
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    with opened(Interpreter, folder) as interpreter:
        for cell in cells:
            interpreter.run(cell)
