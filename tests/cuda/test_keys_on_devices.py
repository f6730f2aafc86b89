"""Dynamic tables of the device back end have the host's keys, counts, clocks and rows, bitwise."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from oper.errors import InvalidInputError, OperError
from oper.integration.checkpoint.deltas import DeltaCheckpoints
from oper.plan import Plan, uniform_plan
from oper.shmem import tables as sharded_tables
from oper.shmem.batch import Lookup
from oper.shmem.counters.changes import ChangedRows
from oper.shmem.device.tables import DeviceTables
from oper.shmem.group.groups import SingleGroup, ThreadGroup
from oper.shmem.keys.directories import RECORDS, KeyCounts, rule_numbers
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.optim.optimizers import SGD, STATE_PARTS, Adam, Optimizer, RowWiseAdagrad
from oper.tables import TableSpec
from tests import runtime_support
from tests.cuda import streams
from tests.cuda.emulated import has_gpu, load, on_devices
from tests.integration import module_support
from tests.random_plans import mixed_plan, rich_plan
from tests.runtime_support import Case, assert_bitwise, run_ranks
from tests.shmem.test_keys import LARGEST, POOL, RULES, SMALLEST, colliding
from tests.world_support import caught

# Dynamic tables of one and several buckets, one with two features, and a static one between them.
CASE = Case(tuple(TableSpec(name, rows, dim, features, pooling, "float32", "sgd")
                  for name, rows, dim, features, pooling in (
                      ("few", 30, 6, ("f",), "sum"), ("static", 50, 8, ("s",), "sum"),
                      ("many", 200, 12, ("m", "n"), "mean"))), ("n", "s", "f", "m"))
OPTIMIZER = RowWiseAdagrad(lr=0.1)
Feed = Callable[[int, int], Lookup]  # by step and rank


@dataclass
class Trained:
    """State of a rank after training."""

    outputs: list[torch.Tensor]
    rows: dict[str, torch.Tensor]
    records: dict[str, torch.Tensor]
    clocks: dict[str, int]
    counts: dict[str, KeyCounts]


def batch_of(keys: Mapping[str, list[list[int]]], dtype: torch.dtype = torch.int64) -> Lookup:
    """A batch with the bags of each key of CASE."""
    bags = [bag for key in CASE.keys for bag in keys[key]]
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    return Lookup(torch.tensor([i for bag in bags for i in bag], dtype=dtype), lengths, CASE.key_of,
                  len(keys["s"]))


def feed(world_size: int, pool: int = 150, size: int = 24) -> Feed:
    """Skewed keys of all magnitudes; one rank has an empty batch now and then."""
    keys = np.random.default_rng(5).integers(SMALLEST, LARGEST, pool)

    def at(step: int, rank: int) -> Lookup:
        rng = np.random.default_rng(100 * step + rank)
        n = 0 if world_size > 1 and (step + rank) % 5 == 4 else max(1, size // world_size)
        bags = {key: [keys[rng.zipf(1.2, rng.integers(0, 5)) % pool].tolist() for _ in range(n)]
                for key in CASE.keys}
        bags["s"] = [[k % 50 for k in bag] for bag in bags["s"]]
        return batch_of(bags)

    return at


def open_dynamic(plan: Plan, group: Any, rules: Mapping[str, DynamicTable],
                 optimizer: Optimizer = OPTIMIZER, case: Case = CASE) -> Any:
    tables = runtime_support.open_tables(case, plan, group, optimizer)
    tables.open_keys(rules)
    return tables


def step_of(tables: Any, batch: Lookup) -> torch.Tensor:
    out = tables.lookup(batch)
    (out * torch.cos(torch.arange(out.numel())).view(out.shape)).sum().backward()
    found: torch.Tensor = out.detach().clone()
    return found


def found_in(tables: Any, outputs: list[torch.Tensor]) -> Trained:
    tables.barrier()
    keys = tables.keys
    parts = {spec.name: [part for part, _ in STATE_PARTS[spec.optimizer]]
             for spec in tables.specs.values()}
    found = Trained(
        outputs,
        {f"{name} {part}": tables.read(name, part=part) for name in tables.specs
         for part in ("rows", *parts[name])},
        {f"{name} {part}": keys.read(name, part, 0, keys.num_records(name, RECORDS[part]))
         for name in keys.tables for part in keys.parts(name)},
        {name: keys.clock(name) for name in keys.tables},
        {name: keys.counts(name) for name in keys.tables})
    tables.barrier()
    return found


def train(plan: Plan, rules: Mapping[str, DynamicTable], batches: Feed, steps: int = 6,
          optimizer: Optimizer = OPTIMIZER, case: Case = CASE,
          between: Callable[[Any, int], None] = lambda tables, step: None) -> list[Trained]:
    """Train on virtual ranks; results by rank."""
    def body(group: ThreadGroup) -> Trained:
        tables = open_dynamic(plan, group, rules, optimizer, case)
        outputs = []
        for step in range(steps):
            between(tables, step)
            outputs.append(step_of(tables, batches(step, group.rank)))
        with torch.no_grad():
            outputs.append(tables.lookup(batches(0, group.rank)).clone())
        found = found_in(tables, outputs)
        tables.close()
        return found

    return run_ranks(plan.world_size, body)


def assert_equal(some: list[Trained], others: list[Trained]) -> None:
    """Compare all but the counts, by rank."""
    for rank, (one, other) in enumerate(zip(some, others, strict=True)):
        assert one.clocks == other.clocks
        for field in ("records", "outputs", "rows"):
            assert_bitwise(getattr(one, field), getattr(other, field), f"{field} of rank {rank}")


def assert_same(patches: pytest.MonkeyPatch, *args: Any, late: bool = False, **kwargs: Any
                ) -> list[Trained]:
    """Train on both back ends and compare. `late`: streams work as late as possible."""
    host = train(*args, **kwargs)
    with patches.context() as inner, streams.in_use(inner, None) if late else on_devices(inner):
        device = train(*args, **kwargs)
    assert_equal(host, device)
    assert [one.counts for one in host] == [one.counts for one in device]
    return host


@pytest.fixture(autouse=True)
def device(emulation: pytest.MonkeyPatch) -> None:
    emulation.setenv("OPER_DEVICE_THREADS", "64")  # few blocks, which is faster
    emulation.setenv("OPER_SEND_BUFFER_BYTES", str(1 << 20))


@pytest.mark.parametrize("number, rule", [*enumerate(RULES)])
def test_training_gives_the_hosts_bits(emulation: pytest.MonkeyPatch, number: int,
                                       rule: DynamicTable) -> None:
    world_size = (1, 2, 4)[number % 3]
    plan = (mixed_plan, lambda *a: rich_plan(*a, columns=True))[number % 2](
        CASE.tables, world_size, number)
    found = assert_same(emulation, plan, {"few": rule, "many": RULES[(number + 1) % len(RULES)]},
                        feed(world_size), optimizer=(OPTIMIZER, Adam(lr=0.05))[number // 2 % 2])
    changes = [*found[0].counts.values()]
    assert sum(c.admitted for c in changes) and sum(c.evicted + c.expired for c in changes)


@given(st.sampled_from(RULES), st.lists(st.lists(st.sampled_from(POOL), max_size=40), min_size=1,
                                        max_size=5), st.sampled_from([1, 20, 100]))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_streams(emulation: pytest.MonkeyPatch, rule: DynamicTable,
                        steps: list[list[int]], slots: int) -> None:
    """The only table is dynamic: keys are sorted by table only with an unused key of the batch."""
    spec = TableSpec("one", slots + 1, 4, ("f",), "sum", "float32", "sgd")
    case = Case((spec,), ("extra", "f") if slots == 20 else ("f",))

    def at(step: int, rank: int) -> Lookup:
        ids = [steps[step][:5] if key == "extra" else steps[step] for key in case.keys]
        return Lookup(torch.tensor([i for of in ids for i in of], dtype=torch.int64),
                      torch.tensor([len(of) for of in ids]), case.key_of, 1)

    assert_same(emulation, uniform_plan([spec], 1, "striped"), {"one": rule}, at, len(steps),
                SGD(lr=0.5), case)


@pytest.mark.parametrize("rule", RULES[3:5])
def test_keys_that_collide(emulation: pytest.MonkeyPatch, rule: DynamicTable) -> None:
    """More new keys of one bucket than a warp has lanes, and than the bucket has slots."""
    spec = TableSpec("one", 130, 4, ("f",), "sum", "float32", "sgd")
    case, keys = Case((spec,), ("f",)), colliding(90, 129, 1, rule.seed)

    def at(step: int, rank: int) -> Lookup:
        ids = torch.tensor((keys[:90 - 20 * step] * 3)[rank::2])
        return Lookup(ids, torch.tensor([ids.numel()]), case.key_of, 1)

    found = assert_same(emulation, uniform_plan([spec], 2, "owned"), {"one": rule}, at, 3,
                        SGD(lr=0.5), case)
    assert found[0].counts["one"].refused > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_16_bits(emulation: pytest.MonkeyPatch, dtype: str) -> None:
    spec = TableSpec("one", 60, 12, ("f",), "sum", dtype, "sgd")
    case = Case((spec,), ("f",))

    def at(step: int, rank: int) -> Lookup:
        ids = torch.arange(40) * (10**15 + step % 2)
        return Lookup(ids, torch.tensor([40]), case.key_of, 1)

    for bound in (0.5, 1e-6, 1e5):
        assert_same(emulation, uniform_plan([spec], 2, "replicated"),
                    {"one": DynamicTable(init_bound=bound)}, at, 2, SGD(lr=0.0), case)


def test_frozen_tables_and_accumulated_passes(emulation: pytest.MonkeyPatch) -> None:
    """A frozen table's directory stays; the keys of passes that are held back are counted once."""
    def between(tables: Any, step: int) -> None:
        own = getattr(tables, "_tables", tables)
        own.frozen = frozenset({"few"} if step in (2, 3) else ())
        if step in (1, 4):
            with tables.no_sync():
                step_of(tables, feed(2)(50 + step, tables.group.rank))

    found = assert_same(emulation, mixed_plan(CASE.tables, 2, 3),
                        {"few": DynamicTable(time_to_live=2),
                         "many": DynamicTable(eviction="lfu", admit_after=2)},
                        feed(2), 6, between=between)
    assert found[0].clocks == {"few": 4, "many": 6}


@pytest.mark.skipif(has_gpu(), reason="the emulation delays")
@pytest.mark.parametrize("world_size", [1, 2])
def test_streams_that_work_late(emulation: pytest.MonkeyPatch, world_size: int) -> None:
    assert_same(emulation, rich_plan(CASE.tables, world_size, 1, columns=True),
                {"few": RULES[0], "many": RULES[2]}, feed(world_size), late=True)


def test_ids_of_32_bits(emulation: pytest.MonkeyPatch) -> None:
    def at(step: int, rank: int) -> Lookup:
        return batch_of({key: [[step, -7 - step, 2**31 - 1] if key != "s" else [1, 2]]
                         for key in CASE.keys}, torch.int32)

    assert_same(emulation, mixed_plan(CASE.tables, 2, 0), {"many": DynamicTable()}
                | {"few": DynamicTable(seed=3)}, at, 3)


def test_another_plan_while_training(emulation: pytest.MonkeyPatch) -> None:
    def between(tables: Any, step: int) -> None:
        if step == 2:
            tables.start_migration(mixed_plan(list(tables.specs.values()), 2, 4), 400)

    assert_same(emulation, mixed_plan(CASE.tables, 2, 0), {"many": RULES[2], "few": RULES[0]},
                feed(2), between=between)


def test_a_refused_batch_changes_no_directory(emulation: pytest.MonkeyPatch) -> None:
    """One rank's batch has an id that the static table lacks; both continue with the next one."""
    plan, rules = mixed_plan(CASE.tables, 2, 1), {"few": RULES[0], "many": RULES[4]}
    spoiled = batch_of({"n": [[5]], "m": [[6]], "f": [[7]], "s": [[50]]})

    def body(group: ThreadGroup, refuses: bool) -> tuple[Trained, list[str]]:
        tables = open_dynamic(plan, group, rules)
        outputs, messages = [], list[str]()
        for step in range(3):
            if refuses and step == 1:
                with caught() as messages:
                    step_of(tables, spoiled if group.rank == 1 else feed(2)(7, 0))
                    tables.synchronize()
            outputs.append(step_of(tables, feed(2)(step, group.rank)))
        return found_in(tables, outputs), messages

    with on_devices(emulation):
        after, plain = ([*run_ranks(2, lambda group, refuses=refuses: body(group, refuses))]
                        for refuses in (True, False))
    assert all(len(messages) == 1 for _, messages in after)
    assert_equal([found for found, _ in after], [wanted for wanted, _ in plain])
    assert plain[0][0].clocks == {"few": 3, "many": 3}


def test_more_keys_than_the_send_buffer_holds(emulation: pytest.MonkeyPatch) -> None:
    """No rank updates its directories; smaller batches go on."""
    emulation.setenv("OPER_SEND_BUFFER_BYTES", str(64 * 12 * 100))

    def body(group: ThreadGroup) -> tuple[str, dict[str, int]]:
        tables = open_dynamic(uniform_plan(CASE.tables, 2, "striped"), group, {"many": RULES[0]})
        num = 101 if group.rank == 1 else 1
        ids = {key: [[*range(num)]] if key == "n" else [[1]] for key in CASE.keys}
        with pytest.raises(OperError) as error:
            step_of(tables, batch_of(ids))
            tables.synchronize()
        step_of(tables, batch_of({key: [[1]] for key in CASE.keys}))
        tables.barrier()
        return str(error.value), {"clock": tables.keys.clock("many"),
                                  "rows": tables.keys.counts("many").occupied}

    with on_devices(emulation):
        (theirs, found), (mine, same) = run_ranks(2, body)
    assert "keys of a batch do not fit" in mine and "keys=10" in mine and "OPER_SEND_BUFFER" in mine
    assert "refused its batch" in theirs
    assert found == same == {"clock": 1, "rows": 1}


def test_a_gradient_for_a_row_that_has_another_key(emulation: pytest.MonkeyPatch) -> None:
    spec = TableSpec("one", 2, 4, ("f",), "sum", "float32", "sgd")
    case = Case((spec,), ("f",))

    def batch(key: int) -> Lookup:
        return Lookup(torch.tensor([key]), torch.tensor([1]), case.key_of, 1)

    def body() -> tuple[str, list[int]]:
        tables = open_dynamic(uniform_plan([spec], 1, "owned"), SingleGroup(),
                              {"one": DynamicTable()}, SGD(lr=1.0), case)
        step_of(tables, batch(1))
        late = tables.lookup(batch(1))
        step_of(tables, batch(2))
        nothing = torch.empty(0, dtype=torch.int64)
        step_of(tables, Lookup(nothing, nothing, case.key_of, 0))  # an update, of no rows
        with pytest.raises(InvalidInputError, match="lost their rows") as messages:
            late.sum().backward()
        step_of(tables, batch(2))
        new = tables.keys.new_rows()
        return str(messages.value), [*tables.keys.read("one", "keys", 0, 1)[0].tolist(), len(new)]

    host = body()
    with on_devices(emulation):
        assert body() == host


@pytest.mark.parametrize("world_size", [1, 2])
def test_records_are_written_and_read(emulation: pytest.MonkeyPatch, world_size: int) -> None:
    """A directory restored from the host's records continues like the host's."""
    plan, rules = mixed_plan(CASE.tables, world_size, 2), {"few": RULES[0], "many": RULES[2]}
    saved = train(plan, rules, feed(world_size), 3)

    def restored(tables: Any, step: int) -> None:
        if step:
            return
        state = saved[tables.group.rank]
        for name, rows in state.rows.items():
            table, part = name.split()
            tables.write(table, rows, part=part)
        tables.flush_replicas()
        for name, records in state.records.items():
            table, part = name.split()
            for begin in range(0, records.shape[0], 20):
                some = records[begin:begin + 20]
                tables.keys.write(table, part, torch.arange(begin, begin + len(some)), some)
        with pytest.raises(InvalidInputError, match=r"record 0=\[1, -1, 0\]"):
            tables.keys.write("few", "keys", torch.tensor([0]), torch.tensor([[1, -1, 0]]), True)
        for table, clock in state.clocks.items():
            tables.keys.set_clock(table, clock)
        tables.barrier()

    assert_same(emulation, plan, rules, lambda step, rank: feed(world_size)(step + 3, rank), 3,
                between=restored)


def test_clock_at_its_end(emulation: pytest.MonkeyPatch) -> None:
    with on_devices(emulation):
        tables = open_dynamic(uniform_plan(CASE.tables, 1, "owned"), SingleGroup(),
                              {"few": RULES[0], "many": RULES[0]})
    tables.keys.set_clock("many", (1 << 32) - 3)
    step_of(tables, feed(1)(0, 0))
    with pytest.raises(OperError, match=r"dynamic table 'many'.*4294967294"):
        step_of(tables, feed(1)(1, 0))
    assert tables.keys.clock("few") == 1


def test_several_memory_domains_are_refused(emulation: pytest.MonkeyPatch) -> None:
    def body(group: ThreadGroup) -> str:
        with pytest.raises(InvalidInputError, match="memory domains=2") as messages:
            open_dynamic(uniform_plan(CASE.tables, 2, "striped"), group, {"few": RULES[0]})
        return str(messages.value)

    with on_devices(emulation):
        run_ranks(2, body, domains=(0, 1))


@pytest.mark.skipif(has_gpu(), reason="the emulation pretends to capture")
def test_graphs_are_refused(emulation: pytest.MonkeyPatch) -> None:
    with emulation.context() as patch, streams.in_use(patch, None):
        tables = open_dynamic(uniform_plan(CASE.tables, 1, "owned"), SingleGroup(),
                              {"few": RULES[0], "many": RULES[0]})
        step_of(tables, feed(1)(0, 0))
        with patch.context() as inner:
            inner.setattr(streams, "is_current_stream_capturing", lambda: True)
            with pytest.raises(InvalidInputError, match="cannot capture a lookup in a graph"):
                tables.lookup(feed(1)(1, 0))
        step_of(tables, feed(1)(1, 0))
        assert tables.keys.clock("few") == 2
        tables.close()


@pytest.mark.parametrize("admit_after, most", [(1, 17.5), (2, 24.0)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_per_slot(admit_after: int, most: float, world_size: int) -> None:
    load()
    for slots in (100_000, 1_000_003):
        numbers = rule_numbers("keys", slots + 1, DynamicTable(admit_after=admit_after))
        found = sum(torch.ops.oper.device_keys_num_bytes(
            rank, world_size, 0, torch.tensor([[*numbers, 0, 0, 0]]), torch.zeros(1, 2).double())[1]
            for rank in range(world_size))
        assert 17 <= found / slots <= most


@contextmanager
def models_on_device(patches: pytest.MonkeyPatch) -> Iterator[str]:
    """`oper.shard` uses the device back end for modules on the device that this yields."""
    class Emulated(DeviceTables):
        def __init__(self, plan: Plan, features: Any, group: Any, optimizers: Any, scale: float,
                     seed: int | None) -> None:
            super().__init__(plan, features, group, optimizers, scale, device="cpu")

    with patches.context() as patch:
        if not has_gpu():
            patch.setattr(sharded_tables, "ShardedTables", Emulated)
        yield "cuda" if has_gpu() else "cpu"


def open_model(device: str, rule: DynamicTable) -> Any:
    return module_support.shard(module_support.bag(30).to(device), dynamic=rule,
                                optimizer=OPTIMIZER)


def test_sharded_models(emulation: pytest.MonkeyPatch) -> None:
    """`oper.shard` of a model on a device: outputs, state_dict and counts, saved and loaded."""
    rule = DynamicTable(admit_after=2, eviction="lfu", half_life=3, init_bound=0.5)

    def flat(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.detach().cpu().reshape(-1) for name, value in state.items()}

    def run(device: str) -> list[Any]:
        model = open_model(device, rule)
        found: list[Any] = []
        for step in range(6):
            keys = torch.from_numpy(np.random.default_rng(step).zipf(1.3, (12, 3)) * 10**12)
            if step == 3:
                state = copy.deepcopy(model.state_dict())
                model = open_model(device, rule)
                model.load_state_dict(state)
                found.append(flat(state))
            out = model(keys.to(device))
            (out ** 2).sum().backward()
            found.append(out.detach().cpu().clone())
        counts = model.tables.keys.counts("weight")
        found += [flat(model.state_dict()), torch.tensor([counts.occupied, counts.missed])]
        return found

    host = run("cpu")
    with models_on_device(emulation) as device:
        assert_bitwise(host, run(device), "model")


@pytest.mark.parametrize("world_size, number", [(1, 2), (2, 7)])
def test_changes_since_the_last_delta_are_those_of_the_host(
        emulation: pytest.MonkeyPatch, world_size: int, number: int) -> None:
    """Changed rows, records, and slots with expired keys."""
    plan, rules = mixed_plan(CASE.tables, world_size, 2), {"few": RULES[0], "many": RULES[number]}

    def body(group: ThreadGroup) -> list[Any]:
        tables = open_dynamic(plan, group, rules)
        changed: Any = None
        found: list[Any] = []
        for step in range(8):
            if step == 2:
                changed = ChangedRows(tables)
            step_of(tables, feed(world_size)(step, group.rank))
            if step < 3 or step == 4:
                continue
            for piece, slots in changed.take().items():
                view = tables.view("rows", piece, group.rank)
                rows = torch.empty(slots.size, view.shape[1])
                changed.copy("rows", piece, slots, rows)
                found += [torch.tensor(slots.tolist(), dtype=torch.int64), rows]
            for keys in changed.take_keys():
                if keys.numbers.numel():
                    found += [keys.numbers, *([] if keys.records is None else [keys.records])]
        changed.stop()
        step_of(tables, feed(world_size)(8, group.rank))
        tables.barrier()
        tables.close()
        return found

    host = run_ranks(world_size, body)
    with on_devices(emulation):
        device = run_ranks(world_size, body)
    assert all(sum(x.numel() for x in found) > 1000 for found in host)
    for rank, (one, other) in enumerate(zip(host, device, strict=True)):
        assert_bitwise(one, other, f"changes of rank {rank}")


def test_chains_of_deltas(emulation: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A chain saved on a device restores the run in host memory, and vice versa, bit for bit."""
    def state_of(model: Any) -> list[torch.Tensor]:
        keys = model.tables.keys
        return [model.tables.read("weight"), model.tables.read("weight", part="momentum1"),
                *(keys.read("weight", part, 0, keys.num_records("weight", RECORDS[part]))
                  for part in keys.parts("weight")), torch.tensor([keys.clock("weight")])]

    def run(device: str, steps: range, folder: Path, *, loads: bool) -> list[torch.Tensor]:
        model = open_model(device, DynamicTable(admit_after=2, time_to_live=3, init_bound=0.5))
        with DeltaCheckpoints(folder, model, memory_bytes=4000) as saver:
            if loads:
                assert saver.load().step == steps.start - 1
            for step in steps:
                keys = torch.from_numpy(np.random.default_rng(step).zipf(1.3, (12, 3)) * 10**12)
                (model(keys.to(device)) ** 2).sum().backward()
                saver.save(step)
            saver.flush()
        return state_of(model)

    whole = run("cpu", range(9), tmp_path / "whole", loads=False)
    run("cpu", range(3), tmp_path / "here", loads=False)
    with models_on_device(emulation) as device:
        run(device, range(3, 6), tmp_path / "here", loads=True)
        run(device, range(6), tmp_path / "there", loads=False)
    for folder in ("here", "there"):
        assert_bitwise(run("cpu", range(6, 9), tmp_path / folder, loads=True), whole, folder)
