"""Sharded collections of TorchRec have the interface and results of the unsharded ones."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules import embedding_configs
from torchrec.modules.embedding_modules import EmbeddingCollection

import oper
from oper.errors import InvalidInputError
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.tables import TableSpec
from tests import random_plans as rp, runtime_support as rs
from tests.checkpoint_support import random_kjt
from tests.dlrm_support import configs, copies, make_collection, make_kjt, plan_for, virtual_ranks
from tests.world_support import run_world

OPTIMIZER = RowWiseAdagrad(lr=0.05, eps=1e-8)


def shard(collection: Any, kind: str = "striped", **fields: Any) -> Any:
    fields = {"optimizer": OPTIMIZER, "plan": plan_for(collection, 1, kind)} | fields
    return oper.shard(copy.deepcopy(collection), **fields)


def on_ranks(world_size: int, make: Any, body: Any, kind: str = "striped", **fields: Any
             ) -> list[Any]:
    """Run `body(sharded, group)` on virtual ranks, each with its own copy of `make()`."""
    base = make()
    models = copies(base, world_size)
    fields = {"optimizer": OPTIMIZER, "plan": plan_for(base, world_size, kind)} | fields
    with virtual_ranks() as local:
        def work(group):
            local.group = group
            return body(oper.shard(models[group.rank], **fields), group)

        return rs.run_ranks(world_size, work)


# ---- face ----------------------------------------------------------------------------------------


def test_the_configuration_of_a_collection_is_kept() -> None:
    collection = make_collection()
    sharded = shard(collection)
    assert [c.name for c in sharded.embedding_bag_configs()] == [
        c.name for c in collection.embedding_bag_configs()]
    assert sharded.is_weighted() is False and sharded.device == torch.device("cpu")


def test_a_missing_feature_is_named() -> None:
    kjt = make_kjt(3, 9)
    short = KeyedJaggedTensor.from_jt_dict({k: kjt[k] for k in ("a", "b", "c", "d")})
    with pytest.raises(InvalidInputError, match=r"missing features=\['e'\]"):
        shard(make_collection())(short)


# ---- numbers -------------------------------------------------------------------------------------


def test_weights_of_the_input_are_used_only_by_collections_that_ask_for_them() -> None:
    tables = [c for c in configs() if c.pooling.name == "SUM"]
    weighted = shard(EmbeddingBagCollection(tables=tables, is_weighted=True))
    assert weighted.is_weighted()
    with pytest.raises(Exception, match="weights"):
        weighted(make_kjt(0, 4))
    sharded = shard(make_collection())
    assert torch.equal(sharded(make_kjt(1, 7, weighted=True)).values(),
                       sharded(make_kjt(1, 7)).values())


@pytest.mark.parametrize("divide", [True, False])
def test_gradient_division_follows_torchrecs_switch(divide: bool) -> None:
    from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

    before = get_gradient_division()
    set_gradient_division(divide)
    try:
        def body(sharded, group):
            sharded(make_kjt(group.rank, 6)).values().sum().backward()
            sharded.tables.barrier()
            return sharded.state_dict()["embedding_bags.t4.weight"]

        got = on_ranks(2, make_collection, body, optimizer=oper.SGD(lr=1.0))[0]
    finally:
        set_gradient_division(before)
    unsharded = make_collection()
    for rank in range(2):
        unsharded(make_kjt(rank, 6)).values().sum().backward()
    weight = unsharded.embedding_bags["t4"].weight
    want = weight - weight.grad * (0.5 if divide else 1.0)
    assert torch.allclose(got, want, atol=1e-5) and not torch.allclose(got, weight, atol=1e-3)


# ---- meta device ---------------------------------------------------------------------------------


def test_meta_tables_get_the_same_values_under_any_plan() -> None:
    def body(sharded, group):
        return dict(sharded.state_dict())

    torch.manual_seed(5)
    want = None
    for world_size, kind in ((1, "striped"), (2, "replicated"), (2, "mixed0"), (4, "mixed1"),
                             (4, "owned")):
        def make() -> Any:
            collection = make_collection(device="meta")
            torch.manual_seed(5)
            return collection

        for state in on_ranks(world_size, make, body, kind):
            want = want or state
            rs.assert_bitwise(state, want, f"W={world_size} {kind}")
    for weight in want.values():
        bound = weight.shape[0] ** -0.5  # TorchRec's default range
        assert weight.abs().max() <= bound
        assert weight.numel() < 100 or weight.std() > bound / 3
    values = [w.flatten()[:8] for w in want.values()]
    assert not any(torch.equal(a / a.abs().max(), b / b.abs().max())
                   for k, a in enumerate(values) for b in values[:k]), "tables share a seed"


def test_the_seed_determines_meta_tables() -> None:
    states = []
    for seed in (1, 1, 2):
        collection = make_collection(device="meta")
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        states.append(shard(collection).state_dict()["embedding_bags.t4.weight"])
        assert torch.equal(torch.random.get_rng_state(), before), "sharding moves the generator"
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_init_functions_are_used() -> None:
    tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"],
                                 init_fn=lambda w: torch.nn.init.constant_(w, 7.0))]
    sharded = shard(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    assert (sharded.state_dict()["embedding_bags.t.weight"] == 7).all()


# ---- state and learning rates --------------------------------------------------------------------


def test_a_tag_takes_precedence_over_the_argument() -> None:
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    collection = make_collection()
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.0})
    still = oper.shard(collection, plan=plan_for(collection, 1), optimizer=oper.SGD(lr=9.0))
    before = dict(still.state_dict())
    still(make_kjt(0, 10)).values().square().sum().backward()
    rs.assert_bitwise(dict(still.state_dict()), before, "weights at the tag's rate 0")


def test_a_variable_batch_needs_inverse_indices() -> None:
    plain = EmbeddingBagCollection(tables=[EmbeddingBagConfig(
        num_embeddings=5, embedding_dim=4, name="t", feature_names=["f", "g"])])
    sharded = oper.shard(plain, optimizer=oper.SGD())
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1])
    strides = [[1], [2]]
    with pytest.raises(InvalidInputError, match="inverse_indices"):
        sharded(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths,
                                  stride_per_key_per_rank=strides))
    with pytest.raises(InvalidInputError, match="'g'"):
        sharded(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths, stride_per_key_per_rank=strides,
                                  inverse_indices=(["f"], torch.zeros(1, 2, dtype=torch.int64))))
    good = torch.zeros(2, 2, dtype=torch.int64)
    for bad in (good.int(), good[0], good[:1], good.to("meta")):
        with pytest.raises(InvalidInputError, match=r"inverse_indices=.*int64 \[2, B\] in host"):
            sharded(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths,
                                      stride_per_key_per_rank=strides,
                                      inverse_indices=(["f", "g"], bad)))
    with pytest.raises(InvalidInputError, match="number of lengths=2, expected 3"):
        sharded(KeyedJaggedTensor(["f", "g"], ids[:2], lengths=lengths[:2],
                                  stride_per_key_per_rank=strides,
                                  inverse_indices=(["f", "g"], good)))


def test_inverse_indices_must_be_bags_of_their_feature() -> None:
    """They are refused even if another feature has that many bags, and in a compiled graph."""
    sharded = oper.shard(EmbeddingBagCollection(tables=[EmbeddingBagConfig(
        num_embeddings=5, embedding_dim=4, name="t", feature_names=["f", "g"])]),
        optimizer=oper.SGD())

    def batch(of_f: list[int]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            ["f", "g"], torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4, dtype=torch.int64),
            stride_per_key_per_rank=[[1], [3]],
            inverse_indices=(["f", "g"], torch.tensor([of_f, [0, 1, 2]])))

    def look_up(features: KeyedJaggedTensor) -> torch.Tensor:
        return sharded(features).values()

    compiled = torch.compile(look_up, backend="aot_eager")
    assert torch.equal(look_up(batch([0, 0, 0])), compiled(batch([0, 0, 0])))
    with pytest.raises(InvalidInputError, match=r"inverse_indices of f=.*0 <= bag < 1"):
        look_up(batch([0, 2, 0]))
    with pytest.raises(IndexError):
        compiled(batch([0, 2, 0]))


@pytest.mark.parametrize("how", ["in place", "another", "none"])
def test_a_prefetched_batch_follows_changed_inverse_indices(how: str) -> None:
    plain = EmbeddingBagCollection(tables=[EmbeddingBagConfig(
        num_embeddings=5, embedding_dim=4, name="t", feature_names=["f"])])
    sharded = oper.shard(copy.deepcopy(plain), optimizer=oper.SGD())
    ids, lengths = torch.tensor([1, 2]), torch.tensor([1, 1])
    first, later = torch.tensor([[0, 1]]), torch.tensor([[1, 0]])

    def batch(rows: torch.Tensor | None) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["f"], ids, lengths=lengths,
                                 inverse_indices=None if rows is None else (["f"], rows))

    kjt = batch(later.clone() if how == "none" else first)
    sharded.prefetch(kjt)
    if how == "in place":
        first.copy_(later)
    else:
        kjt = batch(later if how == "another" else None)
    rows = plain.embedding_bags["t"].weight.detach()[ids]
    rs.assert_bitwise(sharded(kjt).values().detach(), rows if how == "none" else rows.flip(0), how)


# ---- unpooled lookups ----------------------------------------------------------------------------

DIM = 20
TABLES = {"t0": (50, ["a", "b"]), "t1": (30, ["b", "c"]), "t2": (1, ["d"]), "t3": (700, ["e"])}
ROWS = {"c": 30, "unused": 10**9, "a": 50, "e": 700, "d": 1, "b": 30}


def collection() -> EmbeddingCollection:
    torch.manual_seed(0)
    return EmbeddingCollection(
        [embedding_configs.EmbeddingConfig(name=n, num_embeddings=rows, embedding_dim=DIM,
                                           feature_names=features)
         for n, (rows, features) in TABLES.items()])


# ---- every plan and world size -------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_plans_are_bitwise_equal(world_size: int) -> None:
    case = rs.Case(tuple(TableSpec(n, rows, DIM, tuple(features), "none")
                         for n, (rows, features) in TABLES.items()), tuple(ROWS))
    steps = rs.make_steps(case, world_size, 5)
    want, *others = (rs.train_virtual(case, plan, steps, oper.Adam(lr=0.01, eps=1e-4))
                     for plan in rp.plans_for(case.tables, world_size).values())
    assert any(not out.shape[0] for step in want.outputs for out in step)  # an empty batch
    for other in others:
        rs.same_bits(other, want)


# ---- gradients of features -----------------------------------------------------------------------


def _trained(apart: bool, gradients: str) -> dict[str, torch.Tensor]:
    """Return the tables after three steps with one gradient tensor per feature, or a single one."""
    torch.manual_seed(1)
    model = oper.shard(collection(), optimizer=oper.Adam(lr=0.1))
    names = list(model(random_kjt(ROWS, 3, 0)))
    for seed in range(3):
        features = random_kjt(ROWS, 9, seed)
        batch = model.lookup_of(features)
        batch.apart = apart
        found = model._jagged(model.tables.lookup(batch), features)
        assert list(found) == names
        g = torch.Generator().manual_seed(seed)
        loss = torch.zeros(())
        for name in names:
            rows = found[name].values()
            factor = torch.rand(rows.shape, generator=g)
            if gradients == "one of several" and name != "b@t1":
                continue  # the other rows have gradients of 0
            # That of a sum is one number, seen as a tensor; of a column, every other number.
            loss = loss + {"sums": rows.sum(), "columns": (rows.T * factor.T)[::2].sum(),
                           }.get(gradients, (rows * factor).sum())
        loss.backward()
    return rs.whole(model.state_dict())


@pytest.mark.parametrize("gradients", ["all", "one of several", "sums", "columns"])
def test_gradients_by_feature_equal_one_gradient(gradients: str) -> None:
    apart, one = (_trained(x, gradients) for x in (True, False))
    rs.assert_bitwise([apart], [one], gradients)
    start = collection().state_dict()
    assert not torch.equal(apart["embeddings.t1.weight"], start["embeddings.t1.weight"])


def test_lengths_ids_and_errors_by_feature() -> None:
    """Keys in the collection's order, in another order, and with one that is not looked up."""
    model = oper.shard(EmbeddingCollection(collection().embedding_configs(), need_indices=True),
                       optimizer=oper.SGD(lr=0.1))
    features = random_kjt(ROWS, 6, 4)
    asked = features.to_dict()
    with torch.no_grad():
        alone = model(features)
    for name, found in model(features).items():
        of = asked[name.split("@")[0]]
        assert torch.equal(found.lengths(), of.lengths())
        assert torch.equal(found.weights(), of.values())
        assert torch.equal(found.offsets(), of.offsets())
        assert torch.equal(found.values(), alone[name].values())
        assert found.values().shape == (of.values().numel(), DIM)
    wrong = KeyedJaggedTensor(features.keys(), features.values(), lengths=features.lengths() + 1)
    with pytest.raises(InvalidInputError, match="lengths of a batch do not match"):
        model(wrong)


# ---- processes -----------------------------------------------------------------------------------


class SequenceModel(nn.Module):
    """A collection, a bare embedding and a dense layer; returns (loss, its value)."""

    def __init__(self) -> None:
        super().__init__()
        self.items = collection()
        self.positions = nn.Embedding(16, DIM, padding_idx=0)
        self.dense = nn.Linear(DIM, 3)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.items(batch.sparse_features)
        names = ["a", "b@t0", "b@t1", "c", "d", "e"]
        rows = torch.cat([found[n].values() for n in names])
        places = self.positions(batch.labels)
        total = self.dense(rows).tanh().sum() + self.dense(places).square().sum()
        loss = total / (batch.dense_features.shape[0] + 1)
        return loss, loss.detach()


def make_batch(seed: int, batch_size: int) -> Any:
    from torchrec.datasets.utils import Batch

    g = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(batch_size, 1, generator=g), random_kjt(ROWS, batch_size, seed),
                 torch.randint(0, 16, (batch_size, 5), generator=g))


def batches_of(rank: int, steps: int) -> list[Any]:
    """Batch sizes differ between ranks, and rank 1 has an empty batch."""
    return [make_batch(100 * rank + s, (7, 4, 11, 2)[(rank + s) % 4] if (rank, s) != (1, 2) else 0)
            for s in range(steps)]


def _body(rank: int, world_size: int, steps: int, pipelined: bool) -> dict[str, torch.Tensor]:
    import torchrec.distributed as trec
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    torch.manual_seed(0)
    model = oper.shard(SequenceModel(), optimizer=oper.RowWiseAdagrad(lr=0.1), batch_size=8)
    wrapped = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=trec.types.ShardingPlan({}), sharders=[])
    dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    batches = batches_of(rank, steps)
    losses = []
    if pipelined:
        pipeline = TrainPipelineSparseDist(wrapped, dense, torch.device("cpu"),
                                           execute_all_batches=True)
        iterator = iter(batches)
        for _ in range(steps):
            losses.append(pipeline.progress(iterator))
    else:
        for batch in batches:
            dense.zero_grad()
            loss, value = wrapped(batch)
            loss.backward()
            dense.step()
            losses.append(value)
    return rs.whole(wrapped.state_dict()) | {"losses": torch.stack(losses)}


def test_pipelined_and_plain_training_are_equal() -> None:
    """tests/programs and tests/rl_rec/test_harness.py compare with unsharded models."""
    plain, piped = (run_world(2, _body, 6, pipelined) for pipelined in (False, True))
    rs.assert_bitwise(piped, plain, "pipelined and not")
    start = SequenceModel().state_dict()["items.embeddings.t0.weight"]
    assert not torch.equal(plain[0]["items.embeddings.t0.weight"], start)
