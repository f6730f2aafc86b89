"""Dynamic tables on ranks that are treated as if on several hosts: the results of one host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import oper
from oper.plan import Piece, Plan, TablePlan, Tier, uniform_plan
from oper.shmem.keys.across import Seen, pack, unpack
from tests.integration.test_dynamic_deltas import assert_same, loaded, saved_run
from tests.integration.test_dynamic_tables import (
    DIM,
    ROWS,
    RULES,
    STEPS,
    bag,
    keys_of,
    records,
    shard,
    step_of,
)
from tests.runtime_support import assert_bitwise
from tests.world_support import run_world


def plan_of(world_size: int, placement: str) -> Plan:
    (spec,) = (t.table for t in shard(bag()).tables.plan.tables)
    if placement != "mixed":
        return uniform_plan([spec], world_size, placement)
    ranks = tuple(range(world_size))
    tiers = (Tier(0, 10, "owned", ranks[-1:]), Tier(10, 20, "striped", ranks, mode="push"),
             Tier(20, ROWS, "replicated", ranks))
    return Plan(world_size, (TablePlan(spec, (
        Piece(0, 3, tiers), Piece(3, DIM, (Tier(0, ROWS, "striped", ranks),)))),))


def _train(rank: int, world_size: int, rule: int, placement: str) -> Any:
    model = shard(bag(), RULES[rule], plan=plan_of(world_size, placement))
    outputs = [step_of(model, step, rank, world_size) for step in range(STEPS)]
    with torch.no_grad():
        seen = model(keys_of(STEPS))
    tables = model.tables
    counts = tables.keys.counts("weight")
    return [torch.stack(outputs), records(model), tables.read("weight"),
            tables.read("weight", part="momentum1"), torch.tensor([tables.keys.clock("weight")]),
            torch.tensor([getattr(counts, name) for name in counts.__slots__]), seen]


@pytest.mark.parametrize("labels, rule, placement", [
    ("abb", 0, "mixed"), ("aabb", 1, "replicated")])
def test_hosts_change_no_bit(labels: str, rule: int, placement: str) -> None:
    """Outputs, keys, counts, clocks, rows, states and statistics are bitwise those of one host;
    without gradients, owners pool for other hosts only."""
    one = run_world(len(labels), _train, rule, placement)
    assert int(one[0][5][0]) == ROWS - 1 and int(one[0][5][4]) > 0  # rows, admitted
    several = run_world(len(labels), _train, rule, placement, labels=labels)
    for rank, (found, wanted) in enumerate(zip(several, one, strict=True)):
        assert torch.allclose(found.pop(), wanted.pop(), rtol=1e-6, atol=1e-6)
        for k, (x, y) in enumerate(zip(found, wanted, strict=True)):
            assert_bitwise(x, y, f"rank {rank}, {k}")


def test_deltas_of_several_hosts_are_those_of_one(tmp_path: Path) -> None:
    """A chain saved on several hosts continues on one host, and vice versa, bit for bit."""
    (held, *_) = run_world(2, saved_run, str(tmp_path / "one"), 0, 1, STEPS)
    (far, *_) = run_world(2, saved_run, str(tmp_path / "two"), 0, 1, STEPS, labels="ab")
    assert_same(far, held, "saved")
    sizes = [sorted(p.stat().st_size for p in tmp_path.glob(f"{n}.deltas/**/*.npz"))
             for n in ("one", "two")]
    assert sizes[1] == sizes[0], "keys are saved once"
    more = range(STEPS + 1, STEPS + 3)
    (one, *_) = run_world(2, loaded, str(tmp_path / "two"), 0, more)
    (two, *_) = run_world(2, loaded, str(tmp_path / "one"), 0, more, labels="ab")
    assert_same(two, one, "went on")


def _refuse(rank: int, world_size: int, harm: str) -> str:
    model = shard(bag(3), oper.DynamicTable(), gradient_guard="stop")
    model(torch.tensor([[1, 2]])).sum().backward()
    late = model(torch.tensor([[2]]))
    model(torch.tensor([[3, 4]])).sum().backward()  # takes both rows
    before = model.tables.keys.clock("weight")
    try:
        if harm == "late":
            (late if rank == 0 else model(torch.tensor([[3]]))).sum().backward()
        else:
            (model(torch.tensor([[3]])).sum() * (float("nan") if rank == 0 else 1.0)).backward()
    except oper.OperError as error:
        assert model.tables.keys.clock("weight") == before
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("harm, message", [("late", "have lost their rows"), ("guard", "gradient")])
def test_a_refused_update_raises_on_all_hosts(harm: str, message: str) -> None:
    """A rank refuses before or after the exchange of keys; errors of the others name it."""
    refused, *others = run_world(3, _refuse, harm, labels="abb")
    assert message in refused
    for said in others:
        assert said.startswith("PeerLostError") and "rank=0" in said, said


def seen(parts: list[list[int]], counts: list[int], missed: list[int]) -> Seen:
    return torch.tensor(counts), torch.tensor(missed, dtype=torch.int64), torch.tensor(parts)


def test_messages_contain_seen_keys() -> None:
    first = seen([[0, 0, 4, 1, 2, 0], [1, 4, 6, 2, 0, 0]], [10, 11, -1, -1, -1, -1], [7, 8, 9])
    second = seen([[1, 0, 3, 0, 1, 1]], [12, -1, -1], [])
    found = unpack(pack([first, second]), torch.tensor([64, 64]))
    assert found is not None
    assert found[0].tolist() == [10, 11, 12] and found[1].tolist() == [7, 8, 9]
    assert found[2].tolist() == [[0, 0, 2, 1, 2, 0], [1, 2, 2, 2, 0, 0], [1, 2, 3, 0, 1, 1]]
    empty = unpack(pack([]), torch.tensor([64]))
    assert empty is not None and [x.numel() for x in empty] == [0, 0, 0]


@pytest.mark.parametrize("at, value", [
    (0, 2), (0, -1), (0, 1 << 60), (1, 1), (1, -1), (2, 1), (4, 3), (4, -1), (5, 1 << 40), (5, -2),
    (7, 64), (8, 0xFFFFFFFF)])
def test_invalid_messages_are_refused(at: int, value: int) -> None:
    words = pack([seen([[0, 0, 4, 1, 2, 0]], [10, 11], [7])])
    assert unpack(words, torch.tensor([64])) is not None
    words[at] = value
    assert unpack(words, torch.tensor([64])) is None
