"""Calls at the beginning of forked processes, and limits of processes."""

import resource
import sys
from pathlib import Path

import pytest

from oper.support.processes import in_child, raise_file_limit
from tests.world_support import child_of


class Held:
    """The name of a file to create in a child."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self) -> None:
        self.path.touch()

    def fail(self) -> None:
        raise ValueError(f"cannot create {self.path.name}")


def test_a_call_that_fails_in_a_child_does_not_skip_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda found: (
        tmp_path / f"error: {found.exc_value}").touch())
    held = [Held(tmp_path / str(k)) for k in range(5)]
    for k, one in enumerate(held):
        in_child(one, Held.fail if k in (1, 3) else Held.create)
    assert child_of(lambda: None) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"0", "2", "4", "error: cannot create 1"}


def test_a_process_may_open_as_many_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(500, before[1]), before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
