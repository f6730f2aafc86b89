"""Worker processes of benchmarks: their threads, and what they write to the terminal."""

import pytest

from oper.bench.core.launch import run_workers
from oper.errors import OperError
from tests.bench.helpers import Failing, Threads


def test_workers_are_quiet_and_every_library_has_the_same_threads(
        capfd: pytest.CaptureFixture[str]) -> None:
    (found,) = run_workers([Threads()], 1, num_threads=2)
    assert found == {"arrow": [2, 2], "torch_log": "ERROR"}
    assert capfd.readouterr().err == "own words\n"


def test_what_a_failing_worker_prints_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OperError, match="ValueError: a number is wrong"):
        list(run_workers([Failing()], 1))
    assert "last words" in capfd.readouterr().err
