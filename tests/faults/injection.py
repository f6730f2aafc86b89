"""Faults of a rank in a phase of training: injection, guarantees, and judgement of the outcome.

A small group of ranks trains. One of them harms itself at a chosen point of a batch: in the kernels
by ``torch.ops.oper.arm_fault``, in Python by a wrapper around a call. The parent process checks
what the other ranks report and when, and looks for leftovers.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import oper
from oper.errors import OperError
from oper.plan import Piece, Plan, TablePlan, Tier
from oper.shmem.group.groups import Group, ProcessGroup
from oper.shmem.migration import Migration
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.tables import TableSpec
from tests.faults import memory
from tests.runtime_support import read_all, short_bags
from tests.world_support import (
    RankFailedError,
    World,
    held_segments,
    leftovers,
    report,
    run_world,
    world,
)

FAULTS = ("kill", "stop", "slow")  # and "memory limit", see tests/faults/memory.py
# Numbers as in csrc/host/faults.h; the other phases are calls in Python.
POINTS = {"resolve": 1, "forward": 2, "outbox": 3, "barrier": 4, "update": 5,
          "replica broadcast": 6}
PHASES = (*POINTS, "checkpoint write", "migration")
# Least number of times that a step reaches each point; the fault is armed for one of them.
_OCCASIONS = {"resolve": 3, "forward": 3, "outbox": 2, "barrier": 4, "update": 2,
              "replica broadcast": 2, "checkpoint write": 4, "migration": 3}
DEADLINE_S = 1.5
KILL_LIMIT_S = 2.0
STOP_LIMIT_S = DEADLINE_S + 2.0
NETWORK_S = 2.0  # additional time if a loss is reported over the network
SLOW_S = 0.3
_STEPS, _ARMED_AT = 6, 2

@dataclass(frozen=True, slots=True)
class Injection:
    """One fault.

    Attributes:
        fault: one of `FAULTS`.
        phase: one of `PHASES`.
        world_size: number of ranks.
        victim: the rank that harms itself.
        occasion: the fault happens when the point is reached for the `occasion`-th time after
            arming.
        seed: seed of plans and batches.
        labels: a letter for each rank; ranks with different letters share no memory. None = all
            share.
    """

    fault: str
    phase: str
    world_size: int
    victim: int
    occasion: int
    seed: int
    labels: str = ""

    @staticmethod
    def draw(fault: str, phase: str, rng: random.Random) -> Injection:
        world_size = rng.choice((2, 2, 3))
        return Injection(fault, phase, world_size, rng.randrange(world_size),
                         rng.randint(1, _OCCASIONS[phase]), rng.randrange(4))

@dataclass(slots=True)
class Outcome:
    """The result of an injection.

    Attributes:
        kept: whether all guarantees were kept.
        detection_s: seconds from the fault to the last survivor's error; None if no error is
            expected.
        leftovers: processes, names, sockets and files that remain.
        broken: the guarantees that were not kept.
    """

    kept: bool = True
    detection_s: float | None = None
    leftovers: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def break_guarantee(self, what: str) -> None:
        self.kept = False
        self.broken.append(what)

# ---- the ranks -----------------------------------------------------------------------------------

def _harm(injection: Injection, note: str) -> None:
    """Inject the faults of `csrc/host/faults.cpp` at points in Python."""
    with open(note, "wb", buffering=0) as file:
        file.write(struct.pack("q", time.monotonic_ns()))
    if injection.fault == "slow":
        time.sleep(SLOW_S)
    elif injection.fault == "memory limit":
        memory.limit_this_process(64 << 20)
        torch.ones(1 << 28)  # memory it already has does not count; this exceeds the limit
    else:
        os.kill(os.getpid(), _SIGNALS[injection.fault])

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "slow": 0}

def _arm(injection: Injection, note: str) -> None:
    """Arm the fault in this process, which is the victim."""
    if injection.phase in POINTS and injection.fault != "memory limit":
        fd = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        torch.ops.oper.arm_fault(POINTS[injection.phase], injection.occasion,
                                 int(_SIGNALS[injection.fault]),
                                 int(SLOW_S * 1e6) if injection.fault == "slow" else 0, fd)
        return
    owner, name = {"update": (ShardedTables, "apply_all"),
                   "checkpoint write": (oper.SavePlanner, "resolve_data"),
                   "migration": (Migration, "_copy")}[injection.phase]
    original = getattr(owner, name)
    count = itertools.count(1)

    def harmed(*args: Any) -> Any:
        if next(count) == injection.occasion:
            _harm(injection, note)
        return original(*args)

    setattr(owner, name, harmed)

def _plan(specs: tuple[TableSpec, ...], world_size: int, seed: int) -> Plan:
    """Make a plan in which every table has replicated, striped and owned rows, one tier pushed."""
    rng = np.random.default_rng(seed)
    entries = []
    for t in specs:
        a, b = sorted(int(x) for x in rng.integers(1, t.num_rows, 2))
        ranks = tuple(int(r) for r in rng.permutation(world_size))
        tiers = [Tier(0, a, "replicated", ranks), Tier(b, t.num_rows, "owned", ranks[:1])]
        if a < b:
            mode = "push" if t.name == "pushed" else "pull"
            tiers.insert(1, Tier(a, b, "striped", ranks, (), mode))
        entries.append(TablePlan(t, (Piece(0, t.dim, tuple(tiers)),)))
    return Plan(world_size, tuple(entries))

SPECS = tuple(TableSpec(n, r, d, (f"f_{n}",), "sum", optimizer="rowwise_adagrad")
               for n, r, d in (("a", 400, 8), ("pushed", 300, 16), ("c", 50, 4)))

def _wait_less(injection: Injection | None) -> None:
    """Wait for stalled peers only as long as the guarantee states from now on.

    Not before: on a busy machine, ranks may be slow to start. A killed peer must be reported as
    killed, however long the machine takes to end its process.
    """
    dist.barrier()
    if injection is not None and injection.fault == "stop":
        os.environ["OPER_DEADLINE_S"] = str(DEADLINE_S)


def open_tables(group: Group, seed: int) -> ShardedTables:
    """Create this rank's tables with initial rows. Collective."""
    tables = ShardedTables(_plan(SPECS, group.world_size, seed),
                           [(f"f_{s.name}", s.name) for s in SPECS],
                           group, RowWiseAdagrad(lr=0.1), 1.0 / group.world_size)
    for s in SPECS:
        g = torch.Generator().manual_seed(seed)
        tables.write(s.name, torch.rand(s.num_rows, s.dim, generator=g))
    tables.flush_replicas()
    return tables


def train_tables(rank: int, world_size: int, injection: Injection | None, note: str, seed: int
                 ) -> dict[str, Any]:
    """Train tables for some steps, with the fault armed halfway; return the final rows, or the
    error."""
    if injection is not None and injection.labels:
        os.environ["OPER_DOMAIN"] = injection.labels[rank]
    _wait_less(injection)
    tables = open_tables(ProcessGroup(), seed)

    def train() -> dict[str, torch.Tensor]:
        for step in range(_STEPS):
            if injection is not None and step == _ARMED_AT:
                if rank == injection.victim:
                    _arm(injection, note)
                if injection.phase == "migration":
                    tables.start_migration(_plan(SPECS, world_size, seed + 1), 1 << 12)
            batch = tables.resolve(short_bags(SPECS, 100 * seed + 10 * step + rank, 6 + rank))
            tables.lookup(batch).square().sum().backward()
        tables.finish_migration()
        return read_all(tables)

    return _outcome_of(train, tables)

class Small(nn.Module):
    """A table with two kinds of bags, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.EmbeddingBag(300, 8, mode="sum")
        self.dense = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.bags(ids)).square().sum()

def small_model(world_size: int, seed: int) -> Any:
    """Make `Small`, sharded."""
    return oper.shard(Small(), optimizer=oper.RowWiseAdagrad(lr=0.1))

def small_step(model: Any, seed: int) -> None:
    """Make one step of the tables and of the dense layer, whose gradients are equal on all ranks.
    """
    model.dense.zero_grad()
    model(torch.randint(0, 300, (4, 3), generator=torch.Generator().manual_seed(seed))).backward()
    with torch.no_grad():
        for p in model.dense.parameters():
            p -= 1e-3 * torch.ones_like(p)

def small_state(model: Any) -> dict[str, torch.Tensor]:
    """Return rows, optimizer state and dense parameters as whole tensors."""
    tables = model.bags.tables
    tables.barrier()
    state = {part: tables.read("bags", part=part) for part in ("rows", "momentum1")}
    tables.barrier()
    return state | {n: p.detach().clone() for n, p in model.dense.named_parameters()}

def save_twice(rank: int, world_size: int, injection: Injection | None, note: str, seed: int,
               folder: str) -> dict[str, Any]:
    """Save, report what was saved, continue training, and save again with the fault armed."""
    small_model(world_size, seed).bags.tables.close()  # all imports
    _wait_less(injection)
    model = small_model(world_size, seed)
    for step in range(3):
        small_step(model, 10 * step + rank)
    oper.save_checkpoint(folder, model, extra={"step": 3})
    report(small_state(model))
    for step in range(3, 5):
        small_step(model, 10 * step + rank)
    if injection is not None and rank == injection.victim:
        _arm(injection, note)

    def save() -> dict[str, torch.Tensor]:
        oper.save_checkpoint(folder, model, extra={"step": 5}, chunk_bytes=256)
        return small_state(model)

    return _outcome_of(save, model.bags.tables)

def load_and_save(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], Any]:
    """Load a checkpoint, report its contents, and save it again."""
    model = small_model(world_size, 0)
    extra = oper.load_checkpoint(folder, model)
    state = small_state(model)
    oper.save_checkpoint(folder, model, extra=extra)
    return extra, state

def _outcome_of(body: Callable[[], dict[str, torch.Tensor]], tables: ShardedTables
                ) -> dict[str, Any]:
    """Return the rows that `body` returns, or its error, and what is still held when the tables are
    closed."""
    found: dict[str, Any] = {"kind": ""}
    try:
        found["rows"] = body()
    except OperError as error:
        found = {"kind": type(error).__name__, "text": str(error), "time": time.monotonic(),
                 "rank": getattr(error, "rank", None)}
    tables.close()
    return found | {"mapped": held_segments()}

# ---- the parent ----------------------------------------------------------------------------------

def _report_of(running: World, rank: int, outcome: Outcome) -> dict[str, Any] | None:
    """Receive a rank's report; None, and a broken guarantee, if it fails otherwise."""
    try:
        found: dict[str, Any] = running.receive(rank)
    except RankFailedError as error:
        outcome.break_guarantee(f"rank {rank}: {str(error).strip().splitlines()[-1]}")
        return None
    return found


def _errors_of_survivors(running: World, injection: Injection, note: Path, outcome: Outcome
                         ) -> None:
    """Receive the errors of all survivors; check their class, the rank that they name, and the
    time."""
    expected, limit = {"kill": ("PeerLostError", KILL_LIMIT_S),
                       "memory limit": ("PeerLostError", KILL_LIMIT_S),
                       "stop": ("DeadlineError", STOP_LIMIT_S)}[injection.fault]
    if injection.labels:
        limit += NETWORK_S
    last = 0.0
    for rank in range(injection.world_size):
        if rank == injection.victim:
            continue
        found = _report_of(running, rank, outcome)
        if found is None:
            continue
        # A survivor may learn of the loss from another one, which names the victim.
        if found["kind"] not in (expected, "PeerLostError"):
            outcome.break_guarantee(f"rank {rank} said {found.get('kind')}: {found.get('text')}")
        elif f"rank={injection.victim}," not in found["text"]:
            outcome.break_guarantee(f"rank {rank} blames another one: {found['text']}")
        if found["mapped"]:
            outcome.break_guarantee(f"rank {rank} still holds {found['mapped']} segments")
        last = max(last, found.get("time", 0.0))
    outcome.detection_s = last - _check_note(note, outcome)
    if outcome.detection_s > limit:
        outcome.break_guarantee(f"noticed after {outcome.detection_s:.2f} s, guaranteed {limit} s")
    if injection.fault == "stop" and outcome.detection_s < DEADLINE_S / 2:
        outcome.break_guarantee(f"given up after {outcome.detection_s:.2f} s already")

def _wake(running: World, injection: Injection, outcome: Outcome) -> None:
    """Continue a stopped rank, which must then report that its peers regard it as lost."""
    os.kill(running.pids[injection.victim], signal.SIGCONT)
    found = _report_of(running, injection.victim, outcome)
    if found is None:
        return
    if found["kind"] not in ("PeerLostError", "DeadlineError"):
        outcome.break_guarantee(f"woken, it said {found['kind']!r}")
    # Between domains, it may report that other ranks are late.
    elif not injection.labels and f"rank={injection.victim}," not in found["text"]:
        outcome.break_guarantee(f"woken, it blames another one: {found['text']}")

def _same_numbers(running: World, injection: Injection, undisturbed: dict[str, torch.Tensor],
                  outcome: Outcome) -> dict[str, torch.Tensor]:
    """Check that all ranks end with the rows of an undisturbed run; return the rows."""
    rows: dict[str, torch.Tensor] = {}
    for rank in range(injection.world_size):
        found = _report_of(running, rank, outcome)
        if found is None:
            continue
        rows = found.get("rows", {})
        if found["kind"]:
            outcome.break_guarantee(f"rank {rank} gave up: {found['text']}")
        elif any(not torch.equal(found["rows"][n], x) for n, x in undisturbed.items()):
            outcome.break_guarantee(f"rank {rank} has other numbers")
    return rows


def _check_note(note: Path, outcome: Outcome) -> float:
    """Return the time of the fault, s; a fault that did not happen is a failure of the test."""
    if not note.exists() or note.stat().st_size != 8:
        outcome.break_guarantee("the fault never happened")
        return time.monotonic()
    at: int = struct.unpack("q", note.read_bytes())[0]
    return at / 1e9


_UNDISTURBED: dict[tuple[Any, ...], dict[str, torch.Tensor]] = {}

def _undisturbed(body: Callable[..., Any], injection: Injection, *args: Any
                 ) -> dict[str, torch.Tensor]:
    """Return the rows of a run without faults, which is made once."""
    key = (body, injection.world_size, injection.seed)
    if key not in _UNDISTURBED:
        results = run_world(injection.world_size, body, None, "", injection.seed, *args)
        rows = results[0].get("rows")
        if rows is None:  # the first report was another one
            raise AssertionError("an undisturbed run gave no rows")
        _UNDISTURBED[key] = rows
    return _UNDISTURBED[key]

def inject(injection: Injection) -> Outcome:
    """Run one injection and judge it."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="oper-fault-") as folder:
        note, saved = Path(folder) / "note", Path(folder) / "c"
        saves = injection.phase == "checkpoint write"
        body, args = (save_twice, (str(saved),)) if saves else (train_tables, ())
        env = {"OPER_DEADLINE_S": "120", "OPER_SEND_BUFFER_BYTES": str(1 << 22)}
        undisturbed, held = {}, {}
        if injection.fault == "slow" and not saves:
            undisturbed = _undisturbed(body, injection)
        with world(injection.world_size, body, injection, str(note), injection.seed, *args,
                   env=env, timeout_s=240) as running:
            if saves:
                held, *_ = [running.receive(r) for r in range(injection.world_size)]
            if injection.fault == "slow":
                found = _same_numbers(running, injection, undisturbed, outcome)
                held = found if saves else held
                _check_note(note, outcome)
            else:
                _errors_of_survivors(running, injection, note, outcome)
            if injection.fault == "stop":
                _wake(running, injection, outcome)
            pids = running.pids
            for process in running.processes:
                process.join(10)
                if process.is_alive():
                    outcome.break_guarantee(f"process {process.pid} does not end")
        if injection.fault == "memory limit":
            memory.sweep(pids[injection.victim])
        outcome.leftovers = leftovers(pids)
        if saves:
            _check_checkpoint(injection, saved, held, outcome)
    return outcome

def _check_checkpoint(injection: Injection, folder: Path, held: dict[str, torch.Tensor],
                      outcome: Outcome) -> None:
    """Check that either the previous checkpoint or the complete new one loads, and that the next
    save removes leftovers."""
    try:
        [(extra, state)] = run_world(1, load_and_save, str(folder))
    except RankFailedError as error:
        outcome.break_guarantee(f"it does not load: {str(error).strip().splitlines()[-1]}")
        return
    wanted = 5 if injection.fault == "slow" else 3
    if extra != {"step": wanted}:
        outcome.break_guarantee(f"loaded {extra}, expected step {wanted}")
    if not held or any(not torch.equal(state[n], x) for n, x in held.items()):
        outcome.break_guarantee("the loaded checkpoint has other numbers")
    outcome.leftovers += [str(p) for p in folder.parent.iterdir() if p.name not in ("c", "note")]
