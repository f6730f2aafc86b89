"""A wheel built from these sources works in a fresh environment, away from the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT

SMOKE = """
import sys, torch, oper
from oper.support.files import datasets_root
assert oper.__file__.startswith(sys.prefix), oper.__file__
assert str(datasets_root()).startswith(sys.prefix) and list(datasets_root().glob("**/*.toml"))
torch.manual_seed(0)
bag = torch.nn.EmbeddingBag(50, 8, mode="sum")
plain = torch.nn.EmbeddingBag(50, 8, mode="sum", _weight=bag.weight.detach().clone())
sharded = oper.shard(bag, optimizer=oper.SGD(lr=0.1))
ids, offsets = torch.tensor([1, 2, 2, 49, 0]), torch.tensor([0, 3, 3])
for _ in range(2):
    expected = plain(ids, offsets)
    torch.testing.assert_close(sharded(ids, offsets), expected)
    sharded(ids, offsets).square().sum().backward()
    expected.square().sum().backward()
    with torch.no_grad():
        plain.weight -= 0.1 * plain.weight.grad
    plain.weight.grad = None
print("same numbers")
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items()
                   if k not in ("PYTHONPATH", "PYTHONHOME") and not k.startswith("OPER_")}
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True,
                          check=False, env=environment, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# Makes a Python process find no torch.
NO_TORCH = """
import importlib.util as u, sys
find = u.find_spec
u.find_spec = lambda name, *a: None if name == "torch" else find(name, *a)
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a source distribution of the tracked files, with a Python that has no torch."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("sdist")
    hidden = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", ".git", ".venv*", "build",
                                    "dist", "runs", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, checkout, ignore=hidden, dirs_exist_ok=True)
    # As build front ends do: ask for the build requirements, then build.
    run(sys.executable, "-c", f"{NO_TORCH}\nfrom setuptools import build_meta as b\n"
        f"assert b.get_requires_for_build_sdist() == []\nb.build_sdist({str(out)!r})", cwd=checkout)
    (path,) = out.glob("oper-*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from the source distribution, reusing compiled objects."""
    unpacked, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    if (ROOT / "build" / "objects").exists():
        shutil.copytree(ROOT / "build" / "objects", source / "build" / "objects")
    # Files that an earlier build left behind must not be packed.
    stale = source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    (stale / "oper").mkdir(parents=True)
    (stale / "oper" / "stale.py").write_text("")
    run(sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps", "--quiet",
        "-w", out, cwd=source)
    (path,) = out.glob("*.whl")
    return path


def test_the_source_distribution_has_all_files_for_tests_and_documents(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True,
                            check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    hosting = (".ci/", ".github/", ".gitignore", ".dockerignore")
    tracked = {n for n in listed.stdout.splitlines() if not n.startswith(hosting)
               and (ROOT / n).exists()}
    assert tracked - names == set()


def test_the_wheel_serves_every_python(wheel: Path) -> None:
    assert wheel.name.split("-", 2)[2].startswith("py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        library = archive.read("oper/_lib/liboper_host.so")
    assert b"PyObject" not in library
    assert {"oper/py.typed", "oper/cli.py", "oper/shmem/tables.py",
            "oper/_lib/liboper_search.so"} <= names
    assert any(n.startswith("oper/datasets/") and n.endswith(".toml") for n in names)
    assert {f"oper/topologies/{p.name}" for p in (ROOT / "oper" / "topologies").glob("*.toml")
            } <= names
    assert not [n for n in names if n.startswith(("tests", "csrc", "datasets")) or "stale" in n]


def test_the_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
        "--quiet", wheel, cwd=tmp_path)
    # A .pth line adds the folder of these tests' torch and other dependencies. It does not add an
    # editable install of this project.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))",
                    cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert run(environment / "bin" / "oper", "--version", cwd=tmp_path).startswith("oper ")
    assert "nothing that the CPU path needs" in run(python, "-m", "oper", "doctor", cwd=tmp_path)
    assert run(python, "-c", SMOKE, cwd=tmp_path).strip() == "same numbers"


def test_a_build_without_torch_names_the_remedy() -> None:
    code = f"{NO_TORCH}\nimport runpy\nsys.argv[1:] = ['dist_info']\nrunpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.strip() == ("oper's build needs torch: install torch first, then run "
                                   "'pip install --no-build-isolation' on this project.")
