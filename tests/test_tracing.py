"""`oper.trace`: every phase of every step and rank at its time; no incomplete files."""

import os
import signal
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oper
from oper.errors import InvalidInputError, OperError
from oper.shmem.counters.phases import PHASES
from oper.shmem.group import clocks
from oper.shmem.group.clocks import clocks_of, compare_clocks
from tests.dlrm_support import make_collection, make_kjt, plan_for, virtual_ranks
from tests.runtime_support import run_ranks
from tests.support import read_trace
from tests.world_support import RankFailedError, report, run_world, world

pytestmark = pytest.mark.filterwarnings("ignore:no access statistics")

Bars = list[dict[str, Any]]


def read(path: Path) -> tuple[dict[str, Any], Bars]:
    """Return the trace, and its bars."""
    trace = read_trace(path)
    return trace, [e for e in trace["traceEvents"] if e["ph"] == "X"]


def names(trace: dict[str, Any], kind: str) -> list[str]:
    return [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == f"{kind}_name"]


def ns(us: float) -> int:
    return round(us * 1000)


def assert_nested(bars: Bars) -> None:
    """Assert that bars of one thread are disjoint or nested."""
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for bar in bars:
        ends, begin = open_until[bar["pid"], bar["tid"]], ns(bar["ts"])
        while ends and ends[-1] <= begin:
            ends.pop()
        end = begin + ns(bar["dur"])
        assert not ends or end <= ends[-1], bar
        ends.append(end)


# ---- two ranks -----------------------------------------------------------------------------------


def steps_of(rank: int, world_size: int, path: Path, steps: Any, count: int
             ) -> list[tuple[dict[str, int], int]]:
    """Train `count` steps, some of them traced; return the clock and the bytes sent after each."""
    collection = make_collection()
    model: Any = oper.shard(collection, plan=plan_for(collection, world_size, "mixed1"),
                            optimizer=oper.RowWiseAdagrad(lr=0.1))
    found = []
    with oper.trace(model, path, steps):
        for step in range(count):
            model.tables.sent_bytes(reset=True)
            out = model(make_kjt(10 * step + rank, 32)).values()
            out.backward(torch.ones_like(out))
            sent = sum(map(sum, model.tables.sent_bytes().values()))
            found.append((model.tables.phase_ns(), sent))
    assert model.tables.on_update == [] and model.tables.take_spans() == ([], 0)
    return found


def in_processes(rank: int, world_size: int, path: Path) -> list[tuple[dict[str, int], int]]:
    return steps_of(rank, world_size, path, (2, 4), 5)


@pytest.mark.parametrize("labels", ["aa", "ab"])
def test_every_phase_of_two_processes(labels: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ranks = run_world(2, in_processes, path, labels=labels)
    trace, bars = read(path)
    assert_nested(bars)
    phases = [b for b in bars if b["cat"] == "phase"]
    assert Counter((b["tid"], b["args"]["step"], b["name"]) for b in phases) == Counter(
        (rank, step, name) for rank in range(2) for step in (2, 3, 4) for name in PHASES)
    for b in phases:  # equal to the runtime's own times, to the nanosecond
        clock, _ = ranks[b["tid"]][b["args"]["step"] - 1]
        assert ns(b["dur"]) == clock[b["name"]], b
    assert {b["name"] for b in bars if b["cat"] == "detail"} == (
        {"barrier"} if labels == "aa" else {"exchange"})
    for rank in range(2):
        for step in (2, 3, 4):
            for kind in ("phase", "detail"):
                sent = sum(b["args"].get("sent_bytes", 0) for b in bars if b["cat"] == kind
                           and (b["tid"], b["args"]["step"]) == (rank, step))
                assert sent == ranks[rank][step - 1][1]
                assert (sent > 0) == (labels == "ab")
    assert len(names(trace, "process")) == len(set(labels))
    assert names(trace, "thread") == ["rank 0", "rank 1"]
    assert trace["otherData"] == {"steps": [2, 4], "ranks": 2, "lost_spans": 0,
                                  "clock_ahead_us": [0.0, 0.0], "clock_uncertainty_us": [0.0, 0.0]}
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_ranks_wait_for_each_other_in_the_trace(tmp_path: Path) -> None:
    """The bars of one host's ranks share a clock: no rank updates before all have reduced."""
    with virtual_ranks() as local:
        def body(group: Any) -> None:
            local.group = group
            steps_of(group.rank, 2, tmp_path / "t.json", None, 3)

        run_ranks(2, body)
    _, bars = read(tmp_path / "t.json")
    assert {b["args"]["step"] for b in bars} == {1, 2, 3}
    for step in (1, 2, 3):
        at = {name: [b for b in bars if (b["name"], b["args"]["step"]) == (name, step)]
              for name in ("reduce", "update")}
        reduced = max(ns(b["ts"]) + ns(b["dur"]) for b in at["reduce"])
        assert all(ns(b["ts"]) >= reduced for b in at["update"])


def _until_killed(rank: int, world_size: int, path: Path) -> None:
    bag: Any = oper.shard(nn.EmbeddingBag(50, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
    with oper.trace(bag, path):
        for step in range(10**9):
            bag(torch.tensor([[1, 2]])).sum().backward()
            if step == 5:
                report(step)


def test_a_killed_rank_leaves_no_file(tmp_path: Path) -> None:
    with world(2, _until_killed, tmp_path / "trace.json") as running:
        assert [running.receive(rank) for rank in range(2)] == [5, 5]
        os.kill(running.pids[0], signal.SIGKILL)
        with pytest.raises(RankFailedError, match="PeerLostError"):
            running.receive(1)
    assert list(tmp_path.iterdir()) == []


def _into_no_folder(rank: int, world_size: int, path: Path) -> str:
    bag: Any = oper.shard(nn.EmbeddingBag(50, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
    with pytest.raises(OSError) as error, oper.trace(bag, path):
        bag(torch.tensor([[1, 2]])).sum().backward()
    bag(torch.tensor([[1, 2]])).sum().backward()  # collective: both ranks still work together
    return error.type.__name__


def test_all_ranks_learn_that_a_trace_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    first, second = run_world(2, _into_no_folder, tmp_path / "file" / "trace.json")
    assert first == second


# ---- one rank ------------------------------------------------------------------------------------


class TwoBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.EmbeddingBag(60, 4, mode="sum") for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.a(ids).sum() + self.b(ids).sum()


IDS = torch.tensor([[1, 2], [3, 4]])


def two_bags() -> Any:
    return oper.shard(TwoBags(), optimizer=oper.SGD(lr=0.1))


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(IDS).backward()


def test_several_collections_on_one_line(tmp_path: Path) -> None:
    model = two_bags()
    with oper.trace(model, tmp_path / "t.json", (12, 13), done=10):
        train(model, 4)
    trace, bars = read(tmp_path / "t.json")
    assert_nested(bars)
    assert names(trace, "thread") == ["rank 0"] and {b["tid"] for b in bars} == {0}
    assert Counter((b["args"]["collection"], b["args"]["step"], b["name"]) for b in bars) == (
        Counter((c, step, name) for c in "ab" for step in (12, 13) for name in PHASES))


def test_ids_resolved_ahead_have_a_line_for_their_thread(tmp_path: Path) -> None:
    model: Any = oper.shard(make_collection(), optimizer=oper.SGD(lr=0.1))
    found: list[Any] = []

    def ahead() -> None:
        found.append(model.tables.resolve(model.lookup_of(make_kjt(1, 8))))

    with oper.trace(model, tmp_path / "t.json"):
        thread = threading.Thread(target=ahead)
        thread.start()
        thread.join()
        model.tables.lookup(found[0]).sum().backward()
    trace, bars = read(tmp_path / "t.json")
    other = next(b for b in bars if b["name"] == "resolve")
    assert other["tid"] == 1 and {b["tid"] for b in bars if b["name"] != "resolve"} == {0}
    assert names(trace, "thread")[0] == "rank 0"
    assert names(trace, "thread")[1].startswith("rank 0, thread ")


def test_a_move_to_another_plan_loses_no_phase(tmp_path: Path) -> None:
    model = oper.shard(make_collection(), optimizer=oper.SGD(lr=0.1))
    before = model.tables.handle
    with oper.trace(model, tmp_path / "t.json"):
        for step in range(12):
            if step == 1:
                oper.migrate(model, plan_for(make_collection(), 1, "owned"), bytes_per_step=40_000)
            out = model(make_kjt(step, 8)).values()
            out.backward(torch.ones_like(out))
    assert model.tables.handle != before, "the move has not ended"
    _, bars = read(tmp_path / "t.json")
    assert Counter((b["args"]["step"], b["name"]) for b in bars) == Counter(
        (step, name) for step in range(1, 13) for name in PHASES)


def test_written_before_the_block_ends(tmp_path: Path) -> None:
    model, path = two_bags(), tmp_path / "t.json"
    with oper.trace(model, path, (1, 2)) as tracing:
        train(model, 2)
        assert not path.exists() and not tracing.is_written
        tracing.write()
        written = path.read_bytes()
        assert tracing.is_written and model.a.tables.on_update == []
        train(model, 2)
    assert path.read_bytes() == written


def test_gradients_that_are_kept_belong_to_the_step_that_applies_them(tmp_path: Path) -> None:
    model = two_bags()
    with oper.trace(model, tmp_path / "t.json"):
        with oper.no_sync(model):
            train(model, 2)
        train(model, 1)
    _, bars = read(tmp_path / "t.json")
    assert Counter((b["args"]["step"], b["name"]) for b in bars
                   if b["name"] in ("forward", "update")) == {(1, "forward"): 6, (1, "update"): 2}


def test_steps_that_are_not_reached(tmp_path: Path) -> None:
    model, path = two_bags(), tmp_path / "t.json"
    with (pytest.warns(UserWarning, match=r"was not written: steps=\(5, 6\).*after step 2;"),
          oper.trace(model, path, (5, 6))):
        train(model, 2)
    assert list(tmp_path.iterdir()) == []
    with (pytest.warns(UserWarning, match=r"steps 2 to 3 only: steps=\(2, 6\).*after step 3;"),
          oper.trace(model, path, (2, 6))):
        train(model, 3)
    assert read(path)[0]["otherData"]["steps"] == [2, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with oper.trace(model, path, (1, 1)):
            train(model, 3)


def test_an_error_in_the_block(tmp_path: Path) -> None:
    model = two_bags()
    with pytest.raises(ZeroDivisionError), oper.trace(model, tmp_path / "t.json"):
        train(model, 2)
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []
    assert model.a.tables.on_update == []
    train(model, 1)
    assert model.a.tables.take_spans() == ([], 0)


def test_bars_beyond_the_limit_are_dropped_and_counted(tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oper.tracing, "_SPANS", 10)
    model = two_bags()
    with (pytest.warns(UserWarning, match="has gaps: bars left out=16"),
          oper.trace(model, tmp_path / "t.json")):
        train(model, 3)
    trace, bars = read(tmp_path / "t.json")
    assert len(bars) == 20 and trace["otherData"]["lost_spans"] == 2 * 3 * len(PHASES) - 20


@pytest.mark.parametrize("steps", [(0, 1), (3, 2), (2, 4, 6), range(5, 9), 5])
def test_invalid_ranges_of_steps_are_refused(steps: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="first <= last"):
        oper.trace(two_bags(), tmp_path / "t.json", steps)


def test_models_and_files_that_cannot_be_traced_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(InvalidInputError, match=r"oper\.shard"):
        oper.trace(TwoBags(), path)
    with pytest.raises(InvalidInputError, match="training"):
        oper.trace(oper.shard(TwoBags(), objective="inference"), path)
    with pytest.raises(InvalidInputError, match="a file"):
        oper.trace(two_bags(), tmp_path)
    with pytest.raises(InvalidInputError, match="s3:"):
        oper.trace(two_bags(), "s3://bucket/t.json")
    model = two_bags()
    with oper.trace(model, path):
        train(model, 1)
        with (pytest.raises(InvalidInputError, match="end the other trace"),
              oper.trace(model, tmp_path / "other.json")):
            pass
        train(model, 1)
    assert len(read(path)[1]) == 2 * 2 * len(PHASES)
    model.a.tables.on_device = True
    with pytest.raises(OperError, match=r"torch\.profiler"):
        oper.trace(model, path)


# ---- clocks --------------------------------------------------------------------------------------


def collectives(ahead: Sequence[int], rounds: int, delay: Callable[[], int]
                ) -> list[list[tuple[int, int]]]:
    """Simulate collectives of ranks with these clocks: each begins at some time and ends after all
    have begun."""
    marks: list[list[tuple[int, int]]] = [[] for _ in ahead]
    now = 0
    for _ in range(rounds):
        begins = [now + delay() for _ in ahead]
        ends = [max(begins) + delay() for _ in ahead]
        now = max(ends)
        for rank, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            marks[rank].append((begin + ahead[rank], end + ahead[rank]))
    return marks


@pytest.mark.parametrize("seed", range(5))
def test_clocks_of_hosts_are_bounded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hosts, host_of = rng.integers(-10**12, 10**12, 3).tolist(), [0, 0, 1, 2, 1]
    ahead = [hosts[h] - hosts[0] for h in host_of]
    marks = collectives(ahead, 20, lambda: int(rng.exponential(50_000)))
    found = clocks_of([str(h) for h in host_of], marks)
    for clock, want in zip(found, ahead, strict=True):
        assert abs(clock.ahead_ns - want) <= clock.uncertainty_ns <= 200_000
    assert [c.uncertainty_ns for c in found[:2]] == [0, 0] and found[2] == found[4]


def test_clocks_are_compared_by_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share one clock, whatever its name."""
    monkeypatch.setattr(clocks, "_name", lambda: threading.current_thread().name)
    for found in run_ranks(2, compare_clocks):
        assert found[0] == (0, 0)
        assert abs(found[1].ahead_ns) <= found[1].uncertainty_ns < 10**9
    monkeypatch.undo()
    for found in run_ranks(2, compare_clocks):
        assert found == [(0, 0), (0, 0)]


def test_hosts_are_processes_and_their_uncertainty_is_stated(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_name", lambda: threading.current_thread().name)
    with virtual_ranks() as local:
        def body(group: Any) -> None:
            local.group = group
            steps_of(group.rank, 2, tmp_path / "t.json", (1, 2), 2)

        run_ranks(2, body, domains=[0, 1])
    trace, bars = read(tmp_path / "t.json")
    assert_nested(bars)
    assert [name.rpartition(": ")[2] for name in names(trace, "process")] == ["ranks 0", "ranks 1"]
    assert {(b["pid"], b["tid"]) for b in bars} == {(0, 0), (1, 1)}
    none, some = trace["otherData"]["clock_uncertainty_us"]
    assert none == 0 < some
    assert abs(trace["otherData"]["clock_ahead_us"][1]) <= some


def test_a_finished_trace_does_not_start_again(tmp_path: Path) -> None:
    bag = oper.shard(nn.EmbeddingBag(9, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
    traced = oper.trace(bag, tmp_path / "trace.json")
    with traced:
        bag(torch.tensor([[1, 2]])).sum().backward()
    with pytest.raises(InvalidInputError, match="already finished"), traced:
        pass
    assert bag.tables.on_update == []
    with pytest.raises(InvalidInputError, match="two integers"):
        oper.trace(bag, tmp_path / "other.json", (1.5, 3))  # type: ignore[arg-type]
