"""Environment variables: invalid values are refused before work begins, and reported by doctor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oper.errors import InvalidInputError
from oper.support.environment import BUILD, VARIABLES, check_environment, problems, setting
from tests import forked
from tests.support import ROOT

WRONG = {
    "OPER_DEBUG": ["yes", "2"],
    "OPER_OUTBOX_BYTES": ["big", "-1", "0", "nan", "inf", "0.5"],
    "OPER_DEVICE_HEAP": ["virtually", "Symmetric"],
    "OPER_FBGEMM": ["/no/such/folder", str(ROOT)],
    "OPER_DEVICE_THREADS": ["0", "many", "-5", "1e4", "9" * 30],
    "OPER_DEVICE_OVERLAP": ["no", "2"],
    "OPER_DEADLINE_S": ["abc", "0", "-3", "inf", "nan"],
    "OPER_CPU_KERNELS": ["sse", "AVX2", "avx512 "],
    "OPER_CUDA": ["yes", "2"],
    "OPER_CUDA_ARCHS": ["eighty", "80,sm_90", "8", "75", "75;90"],
    "MAX_JOBS": ["0", "all", "-1"],
}
RIGHT = {
    "OPER_DATA": ["/some/where"], "OPER_DEBUG": ["0", "1"], "OPER_OUTBOX_BYTES": ["1e9", "4096"],
    "OPER_DEVICE_HEAP": ["symmetric", "virtual"], "OPER_DEVICE_THREADS": ["1", "270336"],
    "OPER_DEVICE_OVERLAP": ["0", "1"], "OPER_DEADLINE_S": ["0.5", "300"], "OPER_DOMAIN": ["a b"],
    "OPER_CPU_KERNELS": ["generic", "avx2", "avx512"],
    "OPER_CUDA": ["auto", "0", "1"], "OPER_CUDA_ARCHS": ["80;90", "80, 90a", "100f"],
    "CUDA_HOME": ["/usr/local/cuda"], "CXX": ["clang++ -v"], "MAX_JOBS": ["2"],
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_every_variable_has_its_cases(tmp_path: Path) -> None:
    assert set(WRONG) == {n for n, v in VARIABLES.items() if v.expected}
    (tmp_path / "fbgemm_gpu").mkdir()
    assert set(RIGHT) | {"OPER_FBGEMM"} == set(VARIABLES)
    assert VARIABLES["OPER_FBGEMM"].accepts(str(tmp_path))


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in WRONG.items() for t in texts])
def test_nonsense_is_refused_by_name(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InvalidInputError, match=f"cannot go: environment variable {name}="):
        setting(name, "cannot go")
    with pytest.raises(InvalidInputError, match=name):
        check_environment(at=VARIABLES[name].at)
    (line,) = problems()
    assert line.startswith(f"{name}=") and VARIABLES[name].expected in line


@pytest.mark.parametrize(("name", "text"), [
    *((n, t) for n, texts in RIGHT.items() for t in texts), *((n, "") for n in VARIABLES)])
def test_valid_values_of_variables_are_accepted(name: str, text: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    assert setting(name) == text
    check_environment()
    check_environment(at=BUILD)
    assert list(problems()) == []


def test_nothing_begins_with_nonsense() -> None:
    """Neither a command, even if it does not use the variable, nor `oper.shard` on one rank."""
    name, text = "OPER_DEADLINE_S", "abc"
    done = forked.run("-m", "oper", "explain", "nothing.json", env={name: text})
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"environment variable {name}='{text}'" in done.stderr
    program = ("import torch, oper; from oper.errors import InvalidInputError\n"
               "bag = torch.nn.EmbeddingBag(9, 4, mode='sum')\n"
               "for act in (lambda: oper.shard(bag, optimizer=oper.SGD()),\n"
               "            lambda: oper.publish(bag, 'environment'),\n"
               "            lambda: oper.attach(bag, 'environment', timeout_s=0)):\n"
               "    try:\n        act()\n"
               f"    except InvalidInputError as error:\n        assert {name!r} in str(error)\n"
               "    else:\n        raise SystemExit('it has begun')\n")
    started = forked.run("-c", program, env={name: text})
    assert started.returncode == 0, started.stderr


def test_doctor_calls_nonsense_a_problem() -> None:
    done = forked.run("-m", "oper", "doctor", env={
        "OPER_CPU_KERNELS": "sse", "OPER_DEADLINE_S": "abc", "MAX_JOBS": "all"})
    assert done.returncode == 1
    missing = done.stdout[done.stdout.index("\nmissing\n"):]
    for line in ("OPER_CPU_KERNELS='sse', expected one of generic, avx2, avx512",
                 "OPER_DEADLINE_S='abc', expected a number of seconds above 0",
                 "MAX_JOBS='all', expected a whole number above 0"):
        assert line in missing
    assert "nothing that the CPU path needs" not in missing
    assert "make setup" not in missing, "the libraries are not to blame"


def test_kernels_that_are_not_in_use_are_told() -> None:
    """If the processor lacks them, or if the variable was set too late."""
    program = ("import os, torch\nfrom oper.shmem import library\nlibrary.register()\n"
               "used = torch.ops.oper.kernel_name()\n"
               "os.environ['OPER_CPU_KERNELS'] = used\nlibrary.load()\n"
               "os.environ['OPER_CPU_KERNELS'] = 'generic' if used != 'generic' else 'avx2'\n"
               "try:\n    library.load()\nexcept ValueError as error:\n"
               "    assert f'{used} are in use' in str(error), error\n"
               "else:\n    raise SystemExit('other kernels run, without a word')\n")
    done = forked.run("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["MAX_JOBS", "OPER_CUDA", "OPER_CUDA_ARCHS"])
def test_the_build_refuses_nonsense(name: str) -> None:
    done = subprocess.run([sys.executable, "setup.py", "-q", "--version"], cwd=ROOT, text=True,
                          capture_output=True, check=False,
                          env={**os.environ, name: WRONG[name][0]})
    assert done.returncode == 1
    assert done.stderr.startswith(f"cannot build: environment variable {name}="), done.stderr
