"""NUMA nodes, simulated by files that describe them as Linux does."""

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import oper
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.shmem.memory import numa
from oper.shmem.memory.numa import Node, bind, find_nodes

Host = Callable[..., None]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Creates a description: processors and distances by node, nodes with memory, allowed nodes."""
    monkeypatch.setattr(numa, "SYSTEM", tmp_path / "node")
    monkeypatch.setattr(numa, "STATUS", tmp_path / "status")

    def describe(nodes: dict[int, tuple[str, str]], memory: str = "", allowed: str = "") -> None:
        for number, (processors, distance) in nodes.items():
            folder = tmp_path / "node" / f"node{number}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{processors}\n")
            (folder / "distance").write_text(f"{distance}\n")
        if memory:
            (tmp_path / "node" / "has_memory").write_text(f"{memory}\n")
        (tmp_path / "status").write_text(
            f"Name:\tx\nMems_allowed_list:\t{allowed}\n" if allowed else "Name:\tx\n")
    return describe


def test_nodes_and_their_processors(host: Host) -> None:
    host({0: ("0-3,8-11", "10 20"), 1: ("4-7,12", "20 10")})
    assert find_nodes() == [Node(0, (0, 1, 2, 3, 8, 9, 10, 11)), Node(1, (4, 5, 6, 7, 12))]


def test_node_numbers_are_the_kernels(host: Host) -> None:
    """Node numbers may have gaps or two digits, and nodes may lack processors."""
    host({0: ("0", "10 20 20 30"), 2: ("1", "20 10 20 30"), 10: ("2", "20 20 10 30"),
          11: ("", "30 30 30 10")})
    assert find_nodes() == [Node(0, (0,)), Node(2, (1,)), Node(10, (2,))]


def test_processors_without_memory_go_to_the_nearest(host: Host) -> None:
    host({0: ("0-1", "10 40 20"), 1: ("2-3", "40 10 30"), 2: ("4", "20 30 10")}, memory="0-1")
    assert find_nodes() == [Node(0, (0, 1, 4)), Node(1, (2, 3))]


def test_nodes_that_are_not_allowed_are_left_out(host: Host) -> None:
    host({0: ("0", "10 20"), 1: ("1", "20 10")}, allowed="1")
    assert find_nodes() == [Node(1, (0, 1))]


@pytest.mark.parametrize("nodes", [{}, {0: ("rubbish", "10")}, {0: ("", "10")}])
def test_one_node_if_the_system_reports_none(host: Host, nodes: dict[int, tuple[str, str]]) -> None:
    host(nodes)
    assert find_nodes() == [Node(0, tuple(range(os.cpu_count() or 1)))]


def test_binding() -> None:
    """Binds to an existing node, and to a node beyond the first word of the kernel's mask."""
    area = mmap.mmap(-1, 1 << 16)
    held = ctypes.c_char.from_buffer(area)
    address = ctypes.addressof(held)
    try:
        here = bind(address, 1 << 16, find_nodes()[0].number)
        if "Operation not permitted" in here or "not implemented" in here:
            pytest.skip(f"mbind: {here}")
        assert here == ""
        area[0] = 7
        assert bind(address, 1 << 16, 200) != ""
    finally:
        del held
        area.close()


def test_a_publication_places_rows_by_node(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes, numbers 0 and 3: the hot rows are on both, the rest on one, each bound to its
    node; a worker reads the copy of the node that its processors belong to."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        pytest.skip("needs two processors")
    first, second = processors[:2]
    host({0: (str(first), "10 20"), 3: (str(second), "20 10")})
    bound: list[int] = []
    monkeypatch.setattr(numa, "bind", lambda address, size, node: bound.append(node) or "")
    torch.manual_seed(0)
    bags = torch.nn.EmbeddingBag(40_000, 16, mode="sum")
    spec = oper.TableSpec("weight", 40_000, 16, ("weight",))
    tiers = (Tier(0, 100, "replicated", (0, 1)), Tier(100, 40_000, "striped", (0, 1)))
    plan = Plan(2, (TablePlan(spec, (Piece(0, 16, tiers),)),), objective="inference")
    hot, cold = torch.arange(100).view(1, -1), torch.arange(100, 40_000, 7).view(1, -1)
    with oper.publish(bags, "test-two-nodes", plan=plan) as publication:
        assert bound == [0, 3, 0, 3]  # both buffers
        assert publication.memory_bytes()["tables"] >= (40_000 + 100) * 64
        read = []
        try:
            for processor in (first, second):
                os.sched_setaffinity(0, {processor})
                served = oper.attach(torch.nn.EmbeddingBag(40_000, 16, mode="sum"),
                                     "test-two-nodes")
                assert torch.equal(served(hot), bags(hot).detach())
                read.append(served.rows_read())
                assert torch.allclose(served(cold), bags(cold).detach(), atol=1e-4)
                read.append(served.rows_read())
                served.close()
        finally:
            os.sched_setaffinity(0, processors)
    for hot_only, both in (read[:2], read[2:]):
        assert hot_only == {"local": 100, "remote": 0}
        assert both["remote"] > 0
    # Memory near one node is far from the other.
    assert read[1]["local"] + read[3]["local"] == cold.numel() + 200
