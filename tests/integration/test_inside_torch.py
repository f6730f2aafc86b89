"""Sharded modules with torch.compile, export, activation checkpoints, autocast and GradScaler."""

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config
import torchrec
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import oper
from oper.errors import InvalidInputError, OperError


class Model(nn.Module):
    """Pooled and unpooled collections and a plain bag under a linear layer."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [torchrec.EmbeddingBagConfig(num_embeddings=50, embedding_dim=8, name="a",
                                              feature_names=["f", "g"]),
                  torchrec.EmbeddingBagConfig(num_embeddings=30, embedding_dim=4, name="b",
                                              feature_names=["h"])]
        self.ebc = torchrec.EmbeddingBagCollection(tables=tables, is_weighted=weighted)
        self.ec = torchrec.EmbeddingCollection(tables=[torchrec.EmbeddingConfig(
            num_embeddings=30, embedding_dim=8, name="c", feature_names=["h"])])
        self.bag = nn.EmbeddingBag(30, 4, mode="mean")
        self.over = nn.Linear(32, 3)

    def sparse(self, batch: Any) -> torch.Tensor:
        sequence = self.ec(batch)["h"].values()
        bag = self.bag(batch.values()[:10].view(5, 2))
        return torch.cat([self.ebc(batch).values(), bag,
                          sequence.sum(0, keepdim=True).expand(5, -1)], 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.over(torch.tanh(self.sparse(batch)))


def jagged(seed: int, weighted: bool = False) -> Any:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 5, (15,), generator=g)
    n = int(lengths.sum())
    return torchrec.KeyedJaggedTensor.from_lengths_sync(
        ["h", "f", "g"], torch.randint(0, 30, (n,), generator=g), lengths,
        torch.rand(n, generator=g) if weighted else None)


def pair(weighted: bool = False, **fields: Any) -> tuple[Any, Any]:
    """Return two equal sharded models."""
    fields = {"optimizer": oper.SGD(lr=0.5)} | fields
    return oper.shard(Model(weighted), **fields), oper.shard(Model(weighted), **fields)


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("weighted", [False, True])
def test_compiled_training_is_bitwise_eager_training(weighted: bool) -> None:
    """One graph without breaks; lookups and updates happen when it runs, not during compilation."""
    eager, other = pair(weighted)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for step in range(4):
        batch = jagged(step, weighted)
        a, b = eager(batch), compiled(batch)
        assert torch.equal(a, b)
        a.pow(2).sum().backward()
        b.pow(2).sum().backward()
        assert_same_state(eager, other)
        assert torch.equal(eager.over.weight.grad, other.over.weight.grad)
    assert other.ebc.tables.num_steps == 4
    with torch.no_grad():
        assert torch.equal(compiled(jagged(9, weighted)), eager(jagged(9, weighted)))
    assert other.ebc.tables.num_steps == 4


# Neither headers compiled in advance nor trial compilations, which take most of the time.
_DEFAULT_BACK_END = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}


@torch._inductor.config.patch(_DEFAULT_BACK_END)
def test_the_default_back_end_compiles_lookups_of_unknown_sizes() -> None:
    eager, other = (m.ec for m in pair())
    sums = [lambda batch, ec=ec: ec(batch)["h"].values().sum(0) for ec in (eager, other)]
    sums[1] = torch.compile(sums[1], fullgraph=True, dynamic=True)
    for step in range(2):
        a, b = (call(jagged(step)) for call in sums)
        torch.testing.assert_close(a, b)
        for out in (a, b):
            out.pow(2).sum().backward()
    torch.testing.assert_close(eager.state_dict(), other.state_dict())


class Beside(nn.Module):
    """Pooled rows under dense layers, beside others whose gradients have the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(200, 64, mode="sum")
        self.over = nn.Linear(64, 64)
        self.dense = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                                   nn.Linear(64, 64))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        beside = self.dense(x)  # first, since its backward pass is then after that of the lookup
        return beside + torch.tanh(self.over(self.bag(ids)))


@torch._inductor.config.patch(_DEFAULT_BACK_END)
def test_the_default_back_end_trains_tables_beside_dense_layers() -> None:
    """Its graphs use the memory of gradients again, before the tables are updated."""
    eager, other = (oper.shard(Beside(), optimizer=oper.SGD(lr=0.5)) for _ in range(2))
    compiled = torch.compile(other, fullgraph=True)
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids, x = torch.randint(0, 200, (32, 3), generator=g), torch.randn(32, 64, generator=g)
        for model in (eager, compiled):
            model(ids, x).pow(2).mean().backward()
        torch.testing.assert_close(eager.state_dict(), other.state_dict())


class Twice(nn.Module):
    """Looks the same rows up twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(40, 4, mode="sum")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bag(ids) + self.bag(ids)


def test_equal_lookups_in_a_graph_are_both_applied() -> None:
    """torch merges equal calls unless they have side effects."""
    eager, other = (oper.shard(Twice(), optimizer=oper.SGD(lr=0.5)) for _ in range(2))
    compiled = torch.compile(other, backend="aot_eager_decomp_partition", fullgraph=True)
    ids = torch.arange(12).view(4, 3)
    for model in (eager, compiled):
        model(ids).sum().backward()
    assert_same_state(eager, other)


def test_per_sample_weights_get_gradients_in_a_graph() -> None:
    eager, other = pair(True)
    compiled = torch.compile(lambda kjt: other.ebc(kjt).values(), backend="aot_eager")
    grads = []
    for call in (lambda kjt: eager.ebc(kjt).values(), compiled):
        batch = jagged(1, True)
        weights = batch.weights().clone().requires_grad_()
        call(torchrec.KeyedJaggedTensor(batch.keys(), batch.values(), weights,
                                        batch.lengths())).pow(2).sum().backward()
        grads.append(weights.grad)
    assert torch.equal(*grads) and grads[0].abs().sum() > 0


def test_updates_read_no_memory_that_a_graph_has_used_again() -> None:
    """Inductor writes other values to an operator's arguments after their last use in the graph."""
    found = []
    for overwrites in (False, True):
        torch.manual_seed(0)
        bag = oper.shard(nn.EmbeddingBag(9, 4, mode="sum"), optimizer=oper.SGD(lr=0.5))
        given = torch.tensor([[1, 2]]), torch.full((1, 2), 3.0), torch.ones(1, 4)
        apply_all = bag.tables.apply_all

        def apply(parts: Any, given: Any = given if overwrites else (), then: Any = apply_all
                  ) -> None:
            for x in given:
                x.zero_()
            then(parts)

        with mock.patch.object(bag.tables, "apply_all", apply):
            out = torch.compile(bag, backend="aot_eager")(given[0], per_sample_weights=given[1])
            out.backward(given[2])
        found.append(bag.weight.detach().clone())
    assert torch.equal(*found)


def test_a_table_frozen_at_a_lookup_in_a_graph_is_not_updated() -> None:
    eager, other = (m.ebc for m in pair())
    for ebc, call in ((eager, eager), (other, torch.compile(other, backend="aot_eager"))):
        call(jagged(0)).values().sum().backward()
        weight = ebc.embedding_bags["a"].weight.requires_grad_(False)
        loss = call(jagged(1)).values().sum()
        weight.requires_grad_(True)
        loss.backward()
    assert_same_state(eager, other)


def test_numbers_of_tables_depend_on_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a program exported in another process would read other tables."""
    numbers = []
    for rows in (9, 9, 10):
        monkeypatch.setattr("oper.shmem.compiled._NUMBERS", itertools.count(10**6))
        bag = oper.shard(nn.EmbeddingBag(rows, 4, mode="sum"), optimizer=oper.SGD(lr=0.5))
        numbers.append(bag.tables.number)
    assert numbers[0] == numbers[1] != numbers[2]


def test_graphs_of_a_gpu_are_not_recorded_with_lookups() -> None:
    for operator in (torch.ops.oper.lookup, torch.ops.oper.lookup_update):
        assert torch.Tag.cudagraph_unsafe in operator.default.tags


@pytest.mark.parametrize("compiles", [False, True])
def test_no_weight_gradient_from_rows_updated_since_the_lookup(compiles: bool) -> None:
    bag = oper.shard(nn.EmbeddingBag(9, 4, mode="sum"), optimizer=oper.SGD(lr=0.5))
    call = torch.compile(bag, backend="aot_eager") if compiles else bag
    ids, weights = torch.tensor([[1, 2]]), torch.ones(2, 1, 2, requires_grad=True)
    first, second = (call(ids, per_sample_weights=w) for w in weights)
    first.sum().backward()
    rows = bag.weight.detach().clone()
    with pytest.raises(InvalidInputError, match="updates of the rows since the lookup=1"):
        second.sum().backward()
    assert torch.equal(bag.weight, rows)


def test_recorders_of_operators_are_refused() -> None:
    """They would record the rows as constants."""
    bag = oper.shard(nn.EmbeddingBag(9, 4, mode="sum"), optimizer=oper.SGD(lr=0.5))
    with pytest.raises(InvalidInputError, match="make_fx"):
        make_fx(bag)(torch.tensor([[1, 2]]))


_OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor",
             "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("pooled, weighted", [(True, True), (True, False), (False, False)])
def test_opcheck(pooled: bool, weighted: bool) -> None:
    """At learning rate 0: opcheck runs the operator several times and compares."""
    module = oper.shard(Model(), optimizer=oper.SGD(lr=0.0))
    tables = module.ebc.tables if pooled else module.ec.tables
    features = len(tables.features)
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 0, 1, 1, 0, 0])[:2 * features]
    ids = ids[:int(lengths.sum())]
    weights = torch.rand(ids.numel(), requires_grad=True) if weighted else None
    for trained in (True, False):
        torch.library.opcheck(torch.ops.oper.lookup.default, (
            tables.anchor if trained else tables.anchor.detach(), ids, lengths,
            weights if trained else None, torch.arange(features), tables.number, 2, pooled,
            *((2, tables.output_columns) if pooled else (ids.numel(), 8)), trained, []),
            # The number of earlier updates, which lookups with weights return, is never the same.
            test_utils=_OPCHECKS[:3] if weights is not None and trained else _OPCHECKS)


def test_export_of_an_inference_model() -> None:
    model, other = pair(objective="inference", optimizer=None)
    with torch.no_grad():
        program = torch.export.export(model.ebc, (jagged(0),), strict=False)
        again = program.module()
        assert torch.equal(again(jagged(0)).values(), other.ebc(jagged(0)).values())
    number = model.ebc.tables.number
    model.ebc.tables.close()
    del model, program, again
    empty = torch.zeros(0)
    with pytest.raises((OperError, RuntimeError), match=f"tables={number}|closed"):
        torch.ops.oper.lookup(empty, torch.tensor([1]), torch.tensor([1, 0, 0]), None,
                              torch.arange(3), number, 1, True, 1, 20, False, [])


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_lookup_that_trains_is_refused(strict: bool) -> None:
    """The program would train only its dense layers."""
    bag = oper.shard(nn.EmbeddingBag(9, 4, mode="sum"), optimizer=oper.SGD(lr=0.5))
    ids = torch.tensor([[1, 2]])
    with pytest.raises(Exception, match=r"export under torch.no_grad\(\)"):
        torch.export.export(bag, (ids,), strict=strict)
    with torch.no_grad():
        program = torch.export.export(bag, (ids,), strict=strict)
    assert torch.equal(program.module()(ids), bag(ids))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    """The recomputed forward reads the same rows; there is one update."""
    plain, kept = pair()
    dummy = torch.zeros(1, requires_grad=True)  # reentrant checkpoints need such an input
    for step in range(3):
        batch = jagged(step)
        a = plain(batch)
        b = checkpoint(lambda batch, _: kept(batch), batch, dummy, use_reentrant=reentrant)
        assert torch.equal(a, b)
        a.pow(2).sum().backward()
        b.pow(2).sum().backward()
        assert_same_state(plain, kept)
        assert kept.ebc.tables.num_steps == step + 1


@pytest.mark.parametrize("compiles", [False, True])
def test_reentrant_checkpoints_refuse_updated_rows(compiles: bool) -> None:
    """Each has its own backward pass, whose update the next one's repeated lookup would read."""
    plain, kept, refused = (oper.shard(nn.Embedding(9, 4), optimizer=oper.SGD(lr=0.5))
                            for _ in range(3))
    for other in (kept, refused):
        other.load_state_dict(plain.state_dict())
    grads = []
    for model in (plain, kept, refused):
        def part(x: torch.Tensor, of: nn.Module = model) -> torch.Tensor:
            return x * of(torch.tensor([1, 2])).cos()

        if compiles:
            part = torch.compile(part, backend="aot_eager")
        x = torch.ones(2, 4, requires_grad=True)
        if model is plain:
            out = part(part(x))
        else:
            out = checkpoint(part, checkpoint(part, x, use_reentrant=model is refused),
                             use_reentrant=model is refused)
        if model is not refused:
            out.sum().backward()
            grads.append(x.grad)
            continue
        with pytest.raises(InvalidInputError, match="use_reentrant=False"):
            out.sum().backward()
        refused(torch.tensor([3])).sum().backward()  # later passes are not concerned
    assert torch.equal(*grads)
    assert_same_state(plain, kept)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("tracked", [False, True])
def test_checkpoints_refuse_detached_lookups_of_updated_rows(compiles: bool, tracked: bool
                                                             ) -> None:
    """The last part's lookup is complete, and its rows are updated, before the first is repeated.
    """
    table = oper.shard(nn.Embedding(9, 4), optimizer=oper.SGD(lr=0.5))
    ids, x = torch.tensor([1, 2]), torch.ones(2, 4, requires_grad=True)
    look_up = torch.compile(table, backend="aot_eager") if compiles else table

    def part(x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(tracked):
            rows = look_up(ids)
        return (x * rows.detach()).sin()

    first = checkpoint(part, x, use_reentrant=False)
    with pytest.raises(InvalidInputError, match="only one part of the model"):
        (first * table(ids)).sum().backward()


def test_autocast() -> None:
    """Outputs stay fp32, dense layers run in bf16, tables get fp32 gradients."""
    sharded, unsharded = oper.shard(Model(), optimizer=oper.SGD(lr=0.5)), Model()
    for step in range(2):
        outs = []
        for model in (sharded, unsharded):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert model.ebc(jagged(step)).values().dtype == torch.float32
                out = model(jagged(step))
            outs.append(out)
            out.float().pow(2).sum().backward()
        assert outs[0].dtype == outs[1].dtype == torch.bfloat16
        assert torch.equal(*outs)
        with torch.no_grad():
            for name, p in unsharded.named_parameters():
                if not name.startswith("over"):
                    p -= 0.5 * p.grad
                    p.grad = None
    for name, p in unsharded.state_dict().items():
        assert torch.allclose(sharded.state_dict()[name], p, rtol=1e-5, atol=1e-6), name


def test_a_hook_removes_the_scale_of_a_gradient_scaler() -> None:
    """The recipe of docs/reference/optimizers.md: tables must not see the scaled loss."""
    plain, scaled = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for model, factor in ((plain, None), (scaled, scaler)):
        out = model.ebc(jagged(0)).values()
        if factor is not None:
            out.register_hook(lambda g: g / scaler.get_scale())
        loss = out.pow(2).sum()
        (loss if factor is None else factor.scale(loss)).backward()
    assert_same_state(copy.copy(plain), scaled)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
@pytest.mark.parametrize("trains", [True, False])
def test_transforms_of_lookups_are_refused_by_name(transform: str, trains: bool) -> None:
    bag = oper.shard(nn.EmbeddingBag(9, 4, mode="sum"), optimizer=oper.SGD(lr=0.1))
    ids = torch.arange(8).reshape(2, 2, 2)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (bag(ids[0]) * x).sum()

    with torch.set_grad_enabled(trains), pytest.raises(InvalidInputError,
                                                       match=f"transform='{transform}'"):
        torch.func.vmap(bag)(ids) if transform == "vmap" else torch.func.grad(scaled)(
            torch.ones(2, 4))
    assert bag(ids[0]).shape == (2, 4)
