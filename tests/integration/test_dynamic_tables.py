"""Dynamic tables in `oper.shard`: rows and states equal plain torch's on any number of ranks."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchrec
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as KJT

import oper
from oper.errors import InvalidInputError
from oper.plan import uniform_plan
from oper.shmem.keys.directories import row_seed
from oper.shmem.optim.optimizers import STATE_PARTS, Optimizer
from tests.integration import module_support
from tests.references import Oracle, first_row, first_states, update_rows
from tests.runtime_support import assert_bitwise
from tests.world_support import run_world

ROWS, DIM, BATCH, STEPS = 40, 8, 12, 12
SMALLEST, LARGEST = -(1 << 63), (1 << 63) - 1
RULE = oper.DynamicTable(eviction="lfu", half_life=3, admit_after=2, init_bound=0.5, seed=9)
RULES = [RULE, oper.DynamicTable(time_to_live=2, init_bound=0.5),
         oper.DynamicTable(admit_probability=0.5, init_bound=0.5)]
OPTIMIZERS: list[Optimizer] = [
    oper.SGD(lr=0.5), oper.RowWiseAdagrad(lr=0.1, eps=1e-3), oper.Adam(lr=0.02, eps=1e-3)]


def shard(module: nn.Module, rule: Any = RULE, **fields: Any) -> Any:
    return module_support.shard(module, dynamic=rule, **{"optimizer": OPTIMIZERS[1]} | fields)


def bag(rows: int = ROWS) -> nn.EmbeddingBag:
    return module_support.bag(rows, DIM)


def keys_of(step: int) -> torch.Tensor:
    """Keys [BATCH, 3], some frequent, some unique, including the smallest and largest int64."""
    g = torch.Generator().manual_seed(step)
    keys = (torch.rand(BATCH, 3, generator=g) ** 2 * 90).long() * (LARGEST // 91) - (1 << 62)
    keys[0] = torch.tensor([SMALLEST, LARGEST, 0])
    return keys


def factors(step: int) -> torch.Tensor:
    return torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(100 + step))


def step_of(model: Any, step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    """Make a training step on this rank's part of the batch; return the output."""
    mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    out = model(keys_of(step)[mine])
    (out * factors(step)[mine]).sum().mul(world_size).backward()
    return out.detach().clone()


def records(model: Any) -> torch.Tensor:
    keys = model.tables.keys
    return torch.cat([keys.read("weight", part, 0, keys.num_records("weight", c)) for part, c in
                      (("keys", False), ("candidates", True))])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("rule", RULES)
def test_rows_and_states_equal_plain_torch(rule: oper.DynamicTable, optimizer: Optimizer) -> None:
    model = shard(bag(), rule, optimizer=optimizer)
    oracle = Oracle(ROWS - 1, rule, row_seed("weight", rule.seed))
    weight = bag().weight.detach().clone()
    state = first_states(optimizer, weight)
    num_evicted = 0
    for step in range(STEPS):
        keys, g = keys_of(step), factors(step)
        rows = torch.tensor([[oracle.row_of(k) for k in sample] for sample in keys.tolist()])
        got = step_of(model, step)
        assert torch.allclose(got, weight[rows].sum(1), rtol=1e-5, atol=1e-6), step
        dense = torch.zeros_like(weight).index_add_(
            0, rows.reshape(-1), g.repeat_interleave(3, dim=0))
        touched = rows.unique()
        w, s = weight[touched], {p: x[touched] for p, x in state.items()}
        update_rows(optimizer, w, s, dense[touched], optimizer.lr, step + 1)
        weight[touched] = w
        for part, x in s.items():
            state[part][touched] = x
        before = set(oracle.held)
        new = oracle.update(keys.reshape(-1).tolist())
        num_evicted += len(before - set(oracle.held))
        fresh = first_states(optimizer, weight)
        for key, row in new.items():
            weight[row] = torch.from_numpy(first_row(key, row_seed("weight", rule.seed), DIM, 0.5))
            for part in state:
                state[part][row] = fresh[part][row]
        assert torch.allclose(model.weight.detach(), weight, rtol=1e-5, atol=1e-6), step
        for part, _ in STATE_PARTS[optimizer.name]:
            assert torch.allclose(model.tables.read("weight", part=part), state[part], rtol=1e-5,
                                  atol=1e-7), (step, part)
    assert num_evicted > 0
    found = {key: (slot + 1, count, clock) for slot, (key, count, clock) in enumerate(
        model.state_dict()["keys"].tolist()) if clock >= 0}
    assert found == oracle.records()


def _train(rank: int, world_size: int, placement: str = "", migrates: bool = False) -> Any:
    plan = None
    if placement:
        (spec,) = (t.table for t in shard(bag()).tables.plan.tables)
        plan = uniform_plan([spec], world_size, placement)
    model = shard(bag(), plan=plan)
    outputs = []
    for step in range(STEPS):
        if migrates and step == 3:
            (spec,) = model.tables.specs.values()
            oper.migrate(model, uniform_plan([spec], world_size, "striped"), bytes_per_step=200)
        outputs.append(step_of(model, step, rank, world_size))
    if rank == 0:  # alone, without gradients
        with torch.no_grad():
            model(keys_of(0))
    counts = model.tables.keys.counts("weight")
    (state,) = (model.tables.read("weight", part=p) for p, _ in STATE_PARTS["rowwise_adagrad"])
    if plan is not None:
        assert migrates is (model.tables.plan.tables[0].pieces != plan.tables[0].pieces)
    return (torch.stack(outputs), records(model), model.tables.read("weight"), state,
            [counts.occupied, counts.admitted, counts.evicted, counts.expired, counts.refused])


def test_ranks_agree_on_keys_and_rows() -> None:
    """Keys, counts and clocks are equal on 1, 2 and 4 ranks; rows up to the order of additions."""
    (one,) = run_world(1, _train)
    assert one[4][2] > 0
    for world_size in (2, 4):
        ranks = run_world(world_size, _train)
        for found in ranks:
            assert torch.equal(found[1], one[1])
            assert found[4] == one[4]
            for k in (2, 3):
                assert torch.allclose(found[k], one[k], rtol=1e-4, atol=1e-5)
        joint = torch.cat([r[0] for r in ranks], dim=1)
        assert torch.allclose(joint, one[0], rtol=1e-4, atol=1e-5)


def test_plans_change_no_bit() -> None:
    """Replicated and striped rows, a repeated run and a migration give bit-identical results."""
    want = run_world(2, _train, "striped")
    for placement, migrates in (("striped", False), ("replicated", False), ("replicated", True)):
        for found, wanted in zip(run_world(2, _train, placement, migrates), want, strict=True):
            assert_bitwise(found[:4], wanted[:4], f"{placement} {migrates}")


def test_a_state_dict_of_another_table_is_refused() -> None:
    model = shard(bag())
    for step in range(3):
        step_of(model, step)
    state = copy.deepcopy(model.state_dict())
    other = shard(bag(), oper.DynamicTable(admit_after=2, seed=1))
    other.load_state_dict(state)  # one bucket: every key belongs there
    with pytest.raises(RuntimeError, match=r"shape.*\(39, 3\)"):
        shard(bag(), RULE).load_state_dict(state | {"keys": state["keys"][1:]})
    with pytest.raises(RuntimeError, match=r"Missing key.*clock"):
        shard(bag()).load_state_dict({k: v for k, v in state.items() if k != "clock"})
    for clock in (torch.tensor(-1), torch.zeros(2), None):
        with pytest.raises(RuntimeError, match="clock="):
            shard(bag()).load_state_dict(state | {"clock": clock})
    with pytest.raises(RuntimeError, match=r"dtype, shape, layout=\(None, \(\), None\)"):
        shard(bag()).load_state_dict(state | {"keys": 3})
    first, second = (state["keys"][:, 2] >= 0).nonzero()[:2, 0].tolist()
    for column, value, message in ((0, state["keys"][first, 0], f"record {second}="),
                                   (2, STEPS + 1, f"newest clock of a key={STEPS + 1}")):
        keys = state["keys"].clone()
        keys[second, column] = value
        with pytest.raises(RuntimeError, match=message):
            shard(bag()).load_state_dict(state | {"keys": keys})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*candidates"):
        shard(bag(), oper.DynamicTable()).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*keys"):
        shard(bag(), None).load_state_dict(state)
    large = shard(bag(301))
    state = large.state_dict()
    at = 250 if Oracle(300, RULE).bucket_of(77) == 0 else 0  # a slot of another bucket
    state["keys"][at] = torch.tensor([77, 1, 0])
    with pytest.raises(RuntimeError, match=rf"record {at}=\[77, 1, 0\]"):
        large.load_state_dict(state)


def test_collection_of_dynamic_and_static_tables() -> None:
    """One KJT with keys and ids trains like two collections, one dynamic and one static."""
    both = module_support.collection("abc", 30)
    apart = {n: module_support.collection(n, 30) for n in "abc"}
    for n, one in apart.items():
        one.load_state_dict({k: v for k, v in both.state_dict().items() if f".{n}." in k})
    rule = oper.DynamicTable(init_bound=0.5)
    both = shard(both, {"b": rule})
    for n in apart:
        apart[n] = shard(apart[n], {"b": rule} if n == "b" else None)
    for step in range(4):
        g = torch.Generator().manual_seed(step)
        lengths = torch.randint(0, 4, (3, BATCH), generator=g)
        ids = [torch.randint(0, 30, (int(n),), generator=g) for n in lengths.sum(1)]
        ids[1] = ids[1] * 10**15 - 7
        names = ["f_c", "f_b", "f_a"]
        order = [2, 1, 0]
        out = both(KJT(names, torch.cat([ids[k] for k in order]),
                       lengths=lengths[order].reshape(-1)))
        (out.values() ** 2).sum().backward()
        for k, (n, one) in enumerate(apart.items()):
            alone = one(KJT([f"f_{n}"], ids[k], lengths=lengths[k]))
            (alone.values() ** 2).sum().backward()
            assert_bitwise(out[f"f_{n}"].detach().contiguous(), alone.values().detach(), n)
    state = both.state_dict()
    for one in apart.values():
        for name, value in one.state_dict().items():
            assert_bitwise(state[name].view(-1), value.view(-1), name)
    assert "embedding_bags.b.keys" in state and "embedding_bags.a.keys" not in state


def test_accumulated_passes_are_one_update() -> None:
    """`no_sync` counts the keys of all its passes and advances the clock by one."""
    joint, parts = shard(bag()), shard(bag())
    for step in range(3):
        keys, g = keys_of(step), factors(step)
        (joint(keys) * g).sum().backward()
        with oper.no_sync(parts):
            (parts(keys[:5]) * g[:5]).sum().backward()
        (parts(keys[5:]) * g[5:]).sum().backward()
    assert_bitwise(records(parts), records(joint), "records")
    assert_bitwise(parts.weight.detach(), joint.weight.detach(), "rows")


def test_only_backward_passes_count() -> None:
    """Lookups without a backward pass, or in a frozen table, do not change the directory."""
    model = shard(bag(), oper.DynamicTable())
    before = records(model)
    model(keys_of(0))
    with torch.no_grad():
        out = model(keys_of(0))
    assert torch.allclose(out, 3 * model.weight[:1].detach().expand(BATCH, -1))
    model.weight.requires_grad_(False)
    model(keys_of(0))
    assert torch.equal(records(model), before)
    counts = model.tables.keys.counts("weight")
    assert (counts.lookups, counts.missed, counts.occupied) == (9 * BATCH, 9 * BATCH, 0)


def test_keys_may_change_between_the_passes() -> None:
    """The counted keys are the keys that were looked up."""
    model, want = shard(bag(), oper.DynamicTable()), shard(bag(), oper.DynamicTable())
    keys = keys_of(0)
    out = model(keys)
    keys.fill_(5)
    out.sum().backward()
    want(keys_of(0)).sum().backward()
    assert torch.equal(records(model), records(want))


def test_keys_of_another_type_are_refused() -> None:
    model = shard(bag(), oper.DynamicTable())
    with pytest.raises(InvalidInputError, match="ids"):
        model(torch.tensor([[1.5]]))


def test_unpooled_and_int32() -> None:
    torch.manual_seed(1)
    model = shard(nn.Embedding(20, 4), oper.DynamicTable(init_bound=0.5))
    keys = torch.tensor([[5, -7], [5, 2**31 - 1]], dtype=torch.int32)
    assert torch.equal(model(keys), model.weight[0].detach().expand(2, 2, 4))
    model(keys).sum().backward()
    out = model(keys.long())
    assert torch.equal(out, model(keys)) and torch.equal(out[0, 0], out[1, 0])
    assert out.reshape(4, 4).unique(dim=0).shape[0] == 3


def _refusals() -> dict[str, tuple[Any, dict[str, Any]]]:
    def pair(**fields: Any) -> nn.Module:
        return torchrec.EmbeddingBagCollection(tables=[torchrec.EmbeddingBagConfig(
            num_embeddings=5, embedding_dim=4, name=n, feature_names=["f"]) for n in "ab"])

    rule = oper.DynamicTable()
    return {
        "tables=\\['no'\\]": (bag(), {"rule": {"no": rule}}),
        "dynamic=7": (bag(), {"rule": 7}),
        "dynamic={'weight': 'lru'}": (bag(), {"rule": {"weight": "lru"}}),
        "objective='inference'": (bag(), {"objective": "inference", "optimizer": None}),
        "padding_idx of 'weight'=0": (nn.EmbeddingBag(5, 4, mode="sum", padding_idx=0), {}),
        "num_embeddings of 'weight'=1": (nn.EmbeddingBag(1, 4, mode="sum"), {}),
        "tables of feature 'f'=\\['a', 'b'\\]": (pair(), {"rule": {"a": rule}}),
    }


@pytest.mark.parametrize("message", list(_refusals()))
def test_refused_tables(message: str) -> None:
    module, fields = _refusals()[message]
    with pytest.raises(InvalidInputError, match=message):
        shard(module, **{"rule": oper.DynamicTable()} | fields)


def test_refused_uses(tmp_path: Path) -> None:
    """Functions that do not support dynamic tables raise an error instead of ignoring keys."""
    from oper.integration.checkpoint.survivors import Survivors
    from oper.shmem.renumbering import renumber

    model = shard(bag())
    for use in (lambda: copy.deepcopy(model), lambda: Survivors(model),
                lambda: oper.DeltaCheckpoints(tmp_path, model).load(newest_rows=True),
                lambda: oper.publish(model, tmp_path),
                lambda: renumber(model.tables, {"weight": np.arange(ROWS)})):
        with pytest.raises(InvalidInputError, match="dynamic tables=\\['weight'\\]"):
            use()


def _send_buffer(rank: int, world_size: int) -> None:
    model = shard(bag(), oper.DynamicTable())
    with pytest.raises(oper.OperError, match="the keys of a batch do not fit the send buffer"):
        model(torch.arange(2 * 4096)[None]).sum().backward()


def test_a_batch_with_too_many_keys() -> None:
    run_world(1, _send_buffer, env={"OPER_SEND_BUFFER_BYTES": "65536"})


def test_compiled_models_break_the_graph() -> None:
    """Compiled models train dynamic tables outside of graphs; export is refused."""
    model, want = shard(bag()), shard(bag())
    compiled: Any = torch.compile(model, backend="eager")
    for step in range(4):
        assert_bitwise(compiled(keys_of(step)).detach(), want(keys_of(step)).detach(), "outputs")
        step_of(compiled, step)
        step_of(want, step)
    assert torch.equal(records(model), records(want))
    with pytest.raises(InvalidInputError, match="cannot export a lookup"):
        torch.export.export(model, (keys_of(0),))
