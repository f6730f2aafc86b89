"""TorchRec's managed-collision modules, as they are and as dynamic tables."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torchrec.modules import mc_modules
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as KJT

import oper
from oper.errors import InvalidInputError
from tests.runtime_support import assert_bitwise, whole
from tests.world_support import run_world

BATCH, LR, STEPS = 12, 0.1, 6
CPU = torch.device("cpu")


def table_of(pooled: bool, name: str, rows: int, features: list[str], **fields: Any) -> Any:
    config = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    return config(num_embeddings=rows, embedding_dim=8, name=name, feature_names=features, **fields)


def inner_of(tables: list[Any], pooled: bool = True) -> Any:
    torch.manual_seed(0)
    kind = torchrec.EmbeddingBagCollection if pooled else torchrec.EmbeddingCollection
    return kind(tables=tables, device=CPU)


def mapped(tables: list[Any], maps: Sequence[Any], pooled: bool) -> Any:
    """A collection of tables, each behind its map."""
    collection = ManagedCollisionCollection(
        {t.name: of for t, of in zip(tables, maps, strict=True)}, tables)
    kind = (ManagedCollisionEmbeddingBagCollection if pooled
            else ManagedCollisionEmbeddingCollection)
    return kind(inner_of(tables, pooled), collection, return_remapped_features=True)


def make(pooled: bool = True) -> Any:
    return mapped([table_of(pooled, "t", 20, ["f", "g"])], [MCHManagedCollisionModule(
        20, CPU, LFU_EvictionPolicy(), eviction_interval=2)], pooled)


def batch_of(step: int, rank: int, world_size: int) -> KJT:
    """Return a rank's samples of a batch, with two ids in every bag."""
    g = torch.Generator().manual_seed(step)
    raw = (torch.rand(2, BATCH, 2, generator=g) ** 3 * 40).long() * 10**9 + step % 3
    mine = raw[:, rank * BATCH // world_size:(rank + 1) * BATCH // world_size]
    return KJT.from_lengths_sync(["f", "g"], mine.reshape(-1),
                                 torch.full((2 * mine.shape[1],), 2))


def _train(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings(record=True) as said:
        model: Any = oper.shard(make(), optimizer=oper.SGD(lr=LR))
    assert not [w for w in said if "map of ids" in str(w.message)]
    found = {}
    for step in range(STEPS):
        out, ids = model(batch_of(step, rank, world_size))
        found[f"ids {step}"] = ids.values().view(2, -1)
        (out.values().pow(2).sum() * world_size).backward()
    model.eval()
    with torch.no_grad():
        _, ids = model(batch_of(STEPS, 0, 1))  # learns nothing, and no rank waits for another
        if rank == 0:
            model(batch_of(STEPS + 1, 0, 1))
    found["map"] = ids.values().clone()
    return found | whole(model.state_dict())


def test_ranks_learn_one_map() -> None:
    """Two ranks map ids and train rows like a single process with the entire batches."""
    (one,) = run_world(1, _train)
    ranks = run_world(2, _train)
    for step in range(STEPS):
        joint = torch.cat([r[f"ids {step}"] for r in ranks], dim=1)
        assert_bitwise(joint, one[f"ids {step}"], f"ids of step {step}")
    assert one["map"].unique().numel() > 5
    for name in (n for n in one if not n.startswith("ids ")):
        for found in ranks:
            assert torch.allclose(found[name].double(), one[name].double(), rtol=1e-5, atol=1e-6
                                  ), name


@pytest.mark.parametrize("pooled", [True, False])
def test_managed_collisions(pooled: bool) -> None:
    """Zero-collision hashing in front of the tables: the same remapped ids, outputs and rows."""
    plain, sharded = make(pooled), oper.shard(make(pooled), optimizer=oper.SGD(lr=LR))
    assert type(sharded).__name__ == type(plain).__name__
    for step in range(6):
        g = torch.Generator().manual_seed(step)
        raw = (torch.rand(24, generator=g) ** 3 * 1e15).long() % (10**12 + step % 3)
        batch = KJT.from_lengths_sync(["f", "g"], raw, torch.full((12,), 2))
        (got, ids), (want, true_ids) = sharded(batch), plain(batch)
        assert torch.equal(ids.values(), true_ids.values())
        values = [(x.values() if pooled else torch.cat([j.values() for j in x.values()]))
                  for x in (got, want)]
        assert torch.allclose(values[0], values[1], rtol=1e-5, atol=1e-6)
        for v in values:
            v.pow(2).sum().backward()
        with torch.no_grad():
            for p in plain.parameters():
                if p.grad is not None:
                    p -= LR * p.grad
                    p.grad = None
    state = plain.state_dict()
    assert sharded.state_dict().keys() == state.keys()
    for name, value in sharded.state_dict().items():
        assert torch.allclose(value.double(), state[name].double(), rtol=1e-5, atol=1e-5), name


def _make_hashing() -> tuple[Any, Any]:
    """The model with a module that learns while it maps, and that module, which has seen 20 ids."""
    model = make()
    maps = HashZchManagedCollisionModule(20, CPU, total_num_buckets=1)
    maps._hash_zch_identities.data[:, 0] = torch.arange(20) * 10**9
    model._managed_collision_collection._managed_collision_modules["t"] = maps
    return model, maps


def _map_frozen(rank: int, world_size: int) -> tuple[str, torch.Tensor]:
    model, maps = _make_hashing()
    sharded: Any = oper.shard(model, optimizer=oper.SGD(lr=LR))
    with pytest.raises(InvalidInputError) as error:
        sharded(batch_of(0, rank, world_size))
    maps.eval()
    _, ids = sharded(batch_of(0, rank, world_size))
    return str(error.value), ids.values().view(2, -1)


def test_modules_that_learn_while_mapping_are_refused() -> None:
    """They are refused in training mode; in eval mode, two ranks map ids like one."""
    ranks = run_world(2, _map_frozen)
    for message, _ in ranks:
        assert "HashZchManagedCollisionModule" in message and ".eval()" in message, message
    model, maps = _make_hashing()
    maps.eval()
    _, ids = model(batch_of(0, 0, 1))
    joint = torch.cat([found for _, found in ranks], dim=1)
    assert torch.equal(joint, ids.values().view(2, -1))
    assert joint.unique().numel() > 5


# ---- tables behind them become dynamic tables ----------------------------------------------------

ROWS, RATE = 40, 0.1


def mch(policy: Any = None, **fields: Any) -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(ROWS, CPU, policy or DistanceLFU_EvictionPolicy(),
                                     eviction_interval=2, **fields)


def hash_zch(policy: HashZchEvictionPolicyName | None = HashZchEvictionPolicyName.LRU_EVICTION,
             **fields: Any) -> HashZchManagedCollisionModule:
    return HashZchManagedCollisionModule(
        ROWS, CPU, total_num_buckets=1, eviction_policy_name=policy,
        eviction_config=HashZchEvictionConfig(features=["f"], single_ttl=9), **fields)


def make_mapped(*maps: Any, pooled: bool = True, **fields: Any) -> Any:
    """A model of tables t and u, each with two features, behind `maps`."""
    return mapped([table_of(pooled, n, ROWS, [f"{n}1", f"{n}2"], **fields)
                   for n in "tu"[:len(maps)]], maps, pooled)


def eight_samples(step: int, num_tables: int = 2) -> KJT:
    """Eight samples with two ids of scattered values in every bag."""
    keys = [f"{n}{k}" for n in ("t", "u")[:num_tables] for k in (1, 2)]
    g = torch.Generator().manual_seed(step)
    ids = (torch.rand(16 * len(keys), generator=g) ** 2 * 120).long() * 0x5851F42D4C957F2D
    return KJT.from_lengths_sync(keys, ids, torch.full((8 * len(keys),), 2))


def values_of(out: Any, pooled: bool) -> torch.Tensor:
    return out.values() if pooled else torch.cat([x.values() for x in out.values()])


SGD = oper.SGD(lr=RATE)
BOUND = (1 / ROWS) ** 0.5
half = functools.partial(mc_modules.probabilistic_threshold_filter, per_id_probability=0.5)


@pytest.mark.parametrize(("of", "fields"), [
    (mch(LFU_EvictionPolicy()), {"eviction": "lfu"}),
    (mch(LRU_EvictionPolicy(decay_exponent=2.5)), {"eviction": "lru"}),
    (mch(), {"eviction": "distance_lfu"}),
    (mch(DistanceLFU_EvictionPolicy(decay_exponent=0.0)), {"eviction": "lfu"}),
    (mch(LFU_EvictionPolicy(half)), {"eviction": "lfu", "admit_probability": 0.5}),
    (mch(LRU_EvictionPolicy(
        threshold_filtering_func=mc_modules.probabilistic_threshold_filter)),
     {"admit_probability": 0.01}),
    (hash_zch(), {}),
    (hash_zch(opt_in_prob=25, percent_reserved_slots=10), {"admit_probability": 0.25})])
def test_settings(of: nn.Module, fields: dict[str, Any]) -> None:
    """The table has the rows and evictions of a dynamic table with the expected settings."""
    model: Any = oper.shard(make_mapped(of), dynamic="torchrec", optimizer=SGD)
    rule = oper.DynamicTable(init_bound=BOUND, **fields)
    direct: Any = oper.shard(inner_of([table_of(True, "t", ROWS, ["t1", "t2"])]), dynamic=rule,
                             optimizer=SGD)
    for step in range(12):
        batch = eight_samples(step, 1)
        out, ids = model(batch)
        want = direct(batch)
        assert_bitwise(out.values(), want.values(), "rows")
        assert torch.equal(ids.values(), batch.values())
        out.values().square().sum().backward()
        want.values().square().sum().backward()
    counts, same = (x.tables.keys.counts("t") for x in (model._embedding_module, direct))
    assert counts == same
    assert counts.evicted > 0 or rule.admit_probability == 0.01


def test_initial_values() -> None:
    fields = {"weight_init_min": -0.75, "weight_init_max": 0.75}
    model: Any = oper.shard(make_mapped(mch(), **fields), dynamic="torchrec",
                            optimizer=oper.SGD(lr=0.0))
    for _ in range(2):
        model(eight_samples(0, 1))[0].values().sum().backward()
    rows = model.state_dict()["_embedding_module.embedding_bags.t.weight"][1:]
    assert 0.6 < float(rows.abs().max()) < 0.75


def train(rank: int, world_size: int, pooled: bool) -> dict[str, torch.Tensor]:
    model: Any = oper.shard(make_mapped(mch(), hash_zch(), pooled=pooled), dynamic="torchrec",
                            optimizer=SGD)
    found = {}
    for step in range(4):
        batch = eight_samples(step)
        lengths = batch.lengths().view(4, world_size, -1)[:, rank].reshape(-1)
        ids = batch.values().view(4, world_size, -1)[:, rank].reshape(-1)
        out, _ = model(KJT.from_lengths_sync(batch.keys(), ids, lengths))
        values = values_of(out, pooled)
        (values.square().sum() * world_size).backward()
        found[f"first {step}"] = values[:1].detach()
    return found | whole(model.state_dict())


@pytest.mark.parametrize("pooled", [True, False])
def test_ranks_have_the_same_keys(pooled: bool) -> None:
    """`HashZchManagedCollisionModule`s cannot be trained on several ranks; their dynamic tables
    can."""
    (one,) = run_world(1, train, pooled)
    kind = "embedding_bags" if pooled else "embeddings"
    for found in run_world(2, train, pooled):
        for table in ("t", "u"):
            prefix = f"_embedding_module.{kind}.{table}"
            assert torch.equal(found[f"{prefix}.keys"], one[f"{prefix}.keys"])
            assert torch.allclose(found[f"{prefix}.weight"], one[f"{prefix}.weight"], atol=1e-6)
    assert not any("_managed_collision" in name for name in one)


def test_tables_are_made_dynamic_by_name() -> None:
    """One table keeps its map, the other is dynamic, with own settings or those of its map."""
    for rule in (oper.DynamicTable(seed=3), "torchrec"):
        plain, model = (make_mapped(mch(), mch(LFU_EvictionPolicy())) for _ in range(2))
        model = oper.shard(model, dynamic={"u": rule}, optimizer=SGD)
        for step in range(5):
            batch = eight_samples(step)
            (got, ids), (want, mapped) = model(batch), plain(batch)
            assert torch.equal(ids["t1"].values(), mapped["t1"].values())
            assert torch.equal(ids["u1"].values(), batch["u1"].values())
            assert torch.allclose(got["t2"], want["t2"], atol=1e-6)
            got.values().sum().backward()
            (want["t1"].sum() + want["t2"].sum()).backward()
            with torch.no_grad():
                weight = plain._embedding_module.embedding_bags["t"].weight
                weight -= RATE * weight.grad
                weight.grad = None
        assert model._embedding_module.tables.keys.tables == {"u": 0}


def test_ids_are_hashed_first() -> None:
    """Ids of one hash have one row."""
    model: Any = oper.shard(make_mapped(mch(input_hash_func=lambda ids, size: ids % size,
                                            input_hash_size=7)), dynamic="torchrec", optimizer=SGD)
    for step in range(3):
        out, ids = model(eight_samples(step, 1))
        assert int(ids.values().max()) < 7
        out.values().sum().backward()
    assert model._embedding_module.tables.keys.counts("t").occupied == 7


class Own(LFU_EvictionPolicy):
    pass


@pytest.mark.parametrize(("of", "words"), [
    (mch(DistanceLFU_EvictionPolicy(decay_exponent=0.5)), "exponent 0 or 1"),
    (mch(LRU_EvictionPolicy(decay_exponent=0.0)), "exponent > 0"),
    (mch(Own()), "'Own'"),
    (mch(LFU_EvictionPolicy(mc_modules.average_threshold_filter)), "threshold_filtering_func"),
    (hash_zch(None), "eviction_policy_name"),
    (hash_zch(HashZchEvictionPolicyName.SINGLE_TTL_EVICTION), "eviction_policy_name"),
    (hash_zch(disable_fallback=True), "disable_fallback"),
    (hash_zch(track_id_freq=True), "track_id_freq")])
def test_settings_without_a_counterpart(of: nn.Module, words: str) -> None:
    """They are refused by name, and the model remains as it was; own settings replace them."""
    model = make_mapped(of)
    with pytest.raises(InvalidInputError, match=f"dynamic table of a managed-collision.*{words}"):
        oper.shard(model, dynamic="torchrec", optimizer=SGD)
    assert model._managed_collision_collection._managed_collision_modules["t"] is of
    oper.shard(model, dynamic={"t": oper.DynamicTable()}, optimizer=SGD)


def test_other_refusals() -> None:
    with pytest.raises(InvalidInputError, match="init_fn of 't'"):
        oper.shard(make_mapped(mch(), init_fn=nn.init.zeros_), dynamic="torchrec", optimizer=SGD)
    with pytest.raises(InvalidInputError, match=r"managed-collision modules=0, expected >= 1"):
        oper.shard(nn.EmbeddingBag(9, 4, mode="sum"), dynamic="torchrec", optimizer=SGD)
    with pytest.raises(InvalidInputError, match=r"unknown tables=\['weight'\]"):
        oper.shard(nn.EmbeddingBag(9, 4, mode="sum"), dynamic={"weight": "torchrec"},
                   optimizer=SGD)
    with pytest.raises(InvalidInputError, match=r"expected an oper\.DynamicTable or 'torchrec'"):
        oper.shard(make_mapped(mch()), dynamic="mch", optimizer=SGD)  # type: ignore[arg-type]
    learned = make_mapped(mch())
    for step in range(3):
        learned(eight_samples(step, 1))
    with pytest.raises(InvalidInputError, match=r"learned keys of 't'=\d+, expected 0"):
        oper.shard(learned, dynamic="torchrec", optimizer=SGD)
    keys = oper.KeyedRows.of_managed_collision(learned.state_dict(), "t").keys
    assert keys.numel() > 5
