"""The symmetric heap: write permissions, open descriptors, and release of memory."""

from __future__ import annotations

import copy
import fcntl
import gc
import os
import pickle
from pathlib import Path

import pytest
import torch

from oper.errors import MissingDependencyError, OperError
from oper.plan import uniform_plan
from oper.shmem import library
from oper.shmem.group.groups import ProcessGroup
from oper.shmem.memory import host_heap as heap_module
from oper.shmem.memory.host_heap import HostHeap
from oper.shmem.optim.optimizers import SGD
from tests.runtime_support import (
    dlrm_case,
    make_batch,
    open_alone,
    open_tables,
    rank_loss,
    run_ranks,
)
from tests.world_support import run_world


def segments() -> list[str]:
    """Permissions of the segments that this process maps, e.g. ``["rw-s", "r--s"]``."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if "memfd:oper" in line]


def descriptors() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(path))
        except OSError:
            continue
    return [f for f in found if "memfd:oper" in f or "pidfd" in f]


def _permissions(rank: int, world_size: int) -> tuple[list[str], list[str], list[str], list[str]]:
    heap = HostHeap(ProcessGroup(), [4096 * (r + 1) for r in range(world_size)])
    held, opened = segments(), descriptors()
    heap.close()
    return held, opened, segments(), descriptors()


def test_a_rank_can_write_only_its_own_arena() -> None:
    for held, opened, after, after_open in run_world(2, _permissions):
        # Own arena and the control segment are writable, the peer's arena is not.
        assert sorted(held) == ["r--s", "rw-s", "rw-s"]
        assert not any("memfd" in f for f in opened), "segments are held by their mappings alone"
        assert after == [] and after_open == []


def test_segments_are_sealed() -> None:
    fd = heap_module.create_segment(8192)
    try:
        for size in (4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_arenas_are_seen_by_all_and_start_as_zeros() -> None:
    def body(group) -> list[float]:
        heap = HostHeap(group, [4096] * 3)
        mine = torch.ops.oper.segment_view(heap.addresses[group.rank], 1024, 1)
        assert not mine.any()
        group.all_gather(None)
        mine.fill_(group.rank + 1.0)
        group.all_gather(None)
        sums = [torch.ops.oper.segment_view(a, 1024, 1).sum().item() for a in heap.addresses]
        group.all_gather(None)
        heap.close()
        return sums

    assert run_ranks(3, body) == [[1024.0, 2048.0, 3072.0]] * 3


def test_unreferenced_tables_release_their_memory() -> None:
    """Unreferenced models release their memory, as a hyperparameter search needs."""
    gc.collect()
    before = len(segments())
    case = dlrm_case("sgd")
    tables = open_alone(case, SGD())
    batch = make_batch(case, 0, 4)
    out = tables.lookup(batch.lookup(case))
    del tables
    rank_loss(out, batch.target).backward()  # the graph still needs them
    assert len(segments()) == before + 2
    del out
    gc.collect()
    assert len(segments()) == before


def test_tables_cannot_be_pickled() -> None:
    """Tables cannot be pickled, since training either of two handles would change both."""
    case = dlrm_case("sgd")
    tables = open_alone(case, SGD())
    for attempt in (copy.copy, pickle.dumps):
        with pytest.raises(OperError, match="state_dict"):
            attempt(tables)


def test_a_virtual_rank_may_close_while_another_reads() -> None:
    case = dlrm_case("sgd")

    def body(group) -> torch.Tensor:
        tables = open_tables(case, uniform_plan(case.tables, 2), group, SGD())
        if group.rank == 0:
            tables.close()
        group.all_gather(None)
        found = tables.read("large") if group.rank == 1 else torch.zeros(0)
        tables.close()
        return found

    assert run_ranks(2, body)[1].shape == (20000, 64)


def test_page_kinds_are_reported() -> None:
    case = dlrm_case("sgd")
    tables = open_alone(case, SGD())
    want = tables.read("large")
    kind = tables.use_huge_pages()
    assert kind == tables.page_kind and ("2MiB" in kind or kind == "4KiB")
    assert torch.equal(tables.read("large"), want)


def test_the_error_for_a_missing_library_says_how_to_build_it(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "oper" / "shmem" / "library.py"))
    with pytest.raises(MissingDependencyError, match="make setup"):
        library.register.__wrapped__()
    folder = tmp_path / "oper" / "_lib"
    folder.mkdir(parents=True)
    (folder / "liboper_host.so").write_bytes(b"not a library")
    with pytest.raises(MissingDependencyError, match="build it again"):
        library.register.__wrapped__()
