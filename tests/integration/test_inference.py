"""`oper.publish` and `oper.attach`: outputs equal the model's, from any source of weights."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.inference.modules import quantize_inference_model
from torchrec.models.dlrm import DLRM

import oper
from oper import inference, topology
from oper.errors import FileFormatError, InvalidInputError, OperError, PlanError
from oper.integration import fused_interaction
from oper.integration.checkpoint.weights import Weights
from oper.shmem.library import load
from oper.shmem.memory.numa import Node
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from tests.support import damage_record
from tests.world_support import run_world

KEYS = ["f0", "f1", "f2"]


def model(device: str = "cpu", seed: int = 0) -> DLRM:
    torch.manual_seed(seed)
    tables = [EmbeddingBagConfig(name=f"t{i}", embedding_dim=16, num_embeddings=100 + i,
                                 feature_names=[KEYS[i]],
                                 pooling=PoolingType.MEAN if i == 1 else PoolingType.SUM)
              for i in range(3)]
    return DLRM(EmbeddingBagCollection(tables=tables, device=torch.device(device)), 5, [8, 16],
                [8, 1]).eval()


@pytest.fixture
def batch() -> tuple[torch.Tensor, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 5, (30,), generator=generator)
    ids = torch.randint(0, 100, (int(lengths.sum()),), generator=generator)
    return (torch.randn(10, 5, generator=generator),
            KeyedJaggedTensor.from_lengths_sync(keys=KEYS, values=ids, lengths=lengths))


@pytest.fixture
def name() -> str:
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture
def served(name: str) -> Iterator[tuple[oper.Publication, oper.ServedModel]]:
    with oper.publish(model(), name) as publication:
        attached = oper.attach(model(seed=9), name)
        yield publication, attached
        attached.close()


def test_outputs_equal_the_models(served, batch) -> None:
    publication, attached = served
    assert torch.equal(attached(*batch), model()(*batch))
    rows = batch[1].values().numel()
    assert attached.rows_read() == {"local": rows, "remote": 0}
    assert publication.publish(model(seed=2)) == 2
    assert torch.equal(attached(*batch), model(seed=2)(*batch))
    assert attached.epoch == 2
    with attached.pinned() as epoch:
        before = attached(*batch)
        publication.publish(model(seed=3))
        assert epoch == 2
        assert torch.equal(attached(*batch), before)
    assert torch.equal(attached(*batch), model(seed=3)(*batch))


def test_a_fused_dlrm_gives_equal_scores(served, batch, name) -> None:
    """Fused lookup and interaction: outputs equal the model's up to rounding."""
    publication, _ = served
    fused = oper.attach(model(seed=9), name, fuse=True)
    kinds = {type(m).__name__ for m in fused._parts[0].modules()}
    assert "FusedDLRM" in kinds
    assert type(fused._parts[0]._after).__name__ == type(fused._parts[0]._before).__name__ == (
        "_Perceptrons")
    for seed in (0, 4):  # of either buffer
        if seed:
            publication.publish(model(seed=seed))
        assert torch.allclose(fused(*batch), model(seed=seed)(*batch), rtol=1e-5, atol=1e-6)
    assert fused.rows_read()["local"] == 2 * batch[1].values().numel()
    samples = torch.arange(36).view(3, 12) % 10  # who share bags
    shared = KeyedJaggedTensor(KEYS, batch[1].values(), lengths=batch[1].lengths(), stride=10,
                               inverse_indices=(KEYS, samples))
    given = torch.randn(12, 5), shared
    assert torch.allclose(fused(*given), model(seed=4)(*given), rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidInputError, match="id=500"):
        fused(batch[0], KeyedJaggedTensor(KEYS, torch.tensor([500]), lengths=torch.tensor(
            [1, *[0] * 29]), stride=10))
    fused.close()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("large", ["none", "first", "last", "all", "off"])
def test_large_layers_of_a_fused_dlrm_use_onednn(large, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(40, 6), (6, 6), (6, 40)] if large != "last" else [(6, 6), (6, 6), (6, 40)]
    layers = [(nn.Linear(*size), k < 2) for k, size in enumerate(sizes)]
    expected = nn.Sequential(*(m for layer, relu in layers for m in (
        layer, nn.ReLU() if relu else nn.Identity())))
    x = torch.randn(9, sizes[0][0])
    load()
    monkeypatch.setattr(fused_interaction, "_fewest_products", lambda: {
        "none": 1 << 30, "first": 9 * 240, "last": 9 * 240}.get(large, 1))
    with (torch.backends.mkldnn.flags(enabled=large != "off", allow_tf32=None),
          torch.inference_mode(), torch.profiler.profile() as seen):
        found = fused_interaction._Perceptrons(layers)(x)
    calls = [e.name for e in seen.events() if e.name.startswith(("oper::", "mkldnn::_linear_p"))]
    small, onednn = "oper::perceptrons", "mkldnn::_linear_pointwise"
    assert calls == {"none": [small], "first": [onednn, small, onednn], "last": [small, onednn],
                     "all": [onednn] * 3, "off": [small]}[large]
    assert torch.allclose(found, expected(x), rtol=1e-5, atol=1e-6)


def _exported(rank: int, world_size: int, strict: bool) -> bool:
    """Whether exported layers have the outputs of torch's for another batch size."""
    layers = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    load()
    fused_interaction._fewest_products = lambda: 5 * 42

    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.fused = layers, fused_interaction._layers(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fused(x)

    with torch.no_grad():
        program = torch.export.export(Exported(), (torch.randn(4, 6),), strict=strict,
                                      dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
        x = torch.randn(9, 6)
        return torch.allclose(program.module()(x), layers(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_layers_of_a_fused_dlrm_are_exported_for_any_batch_size(strict: bool) -> None:
    # In a process of its own: torch.export may fail in one that has traced other models.
    assert run_world(1, _exported, strict) == [True]


def test_only_plain_dlrms_are_fused(name, batch) -> None:
    class Own(DLRM):
        """A subclass that overrides the forward pass, which must not be fused."""

    own = model()
    own.__class__ = Own
    hooked, seen = model(), []
    hooked.sparse_arch.register_forward_hook(lambda *_: seen.append(1))
    with oper.publish(model(), name):
        for given in (own, hooked):
            attached = oper.attach(given, name, fuse=True)
            assert "FusedDLRM" not in {type(m).__name__ for m in attached._parts[0].modules()}
            assert torch.equal(attached(*batch), model()(*batch))
            attached.close()
    assert seen


@pytest.mark.parametrize("kind", ["state_dict", "file", "nested", "distributed", "sharded", "oper"])
def test_weights_come_from_every_kind_of_source(kind: str, served, batch, tmp_path: Path) -> None:
    publication, attached = served
    new = model(seed=4)
    expected = new(*batch)
    source: object = new.state_dict()
    if kind == "file":
        torch.save(source, tmp_path / "weights.pt")
        source = tmp_path / "weights.pt"
    elif kind == "nested":
        torch.save({"step": 3, "x": {"model": source}}, tmp_path / "weights.pt")
        source = str(tmp_path / "weights.pt")
    elif kind == "distributed":
        dcp.save({"model": source}, checkpoint_id=tmp_path / "saved", no_dist=True)
        source = tmp_path / "saved"
    elif kind in ("sharded", "oper"):
        trained = oper.shard(new, optimizer=oper.SGD(lr=0.1))
        trained(*batch).sum().backward()
        with torch.no_grad():
            expected = trained(*batch)
        source = trained
        if kind == "oper":
            oper.save_checkpoint(tmp_path / "saved", trained)
            source = tmp_path / "saved"
    publication.publish(source)  # type: ignore[arg-type]
    assert torch.equal(attached(*batch), expected)


def test_torchrecs_quantised_rows_are_published_unchanged(name: str, batch) -> None:
    quantised = quantize_inference_model(model())
    with oper.publish(quantised, name) as publication:
        for like in (quantize_inference_model(model(seed=9)), model(seed=9)):
            attached = oper.attach(like, name)
            assert torch.equal(attached(*batch), quantised(*batch))
            attached.close()
        # A float model is quantised on its way: the same codes.
        attached = oper.attach(model("meta"), name)
        publication.publish(model(seed=3))
        assert torch.equal(attached(*batch), quantize_inference_model(model(seed=3))(*batch))
        attached.close()


def test_of_several_models_in_a_source_the_one_called_model_is_read() -> None:
    mine = {"bag.weight": torch.zeros(2, 2), "top.bias": torch.zeros(1)}
    copied = {k: v + 1 for k, v in mine.items()}
    for source in ({"ema": copied, "model": mine}, {**mine, "teacher": copied},
                   {"trained": {**mine, "teacher": copied}},
                   {"ema": {"module": copied}, "model": {"module": mine}}):
        assert float(Weights(source, mine).tensor("top.bias")) == 0.0
    for source in ({"ema": copied, "trained": mine}, {"model": {"left": mine, "right": copied}}):
        with pytest.raises(InvalidInputError, match="weights of several models"):
            Weights(source, mine)


@pytest.mark.parametrize("row_dtype", ["float16", "int8", "int4"])
def test_rows_of_other_types(row_dtype: str, name: str, batch, tmp_path: Path) -> None:
    torch.save(model().state_dict(), tmp_path / "weights.pt")
    # Neither side needs a model with values.
    with oper.publish(model("meta"), name, weights=tmp_path / "weights.pt",
                      row_dtype=row_dtype) as publication:
        attached = oper.attach(model("meta"), name)
        close = {"float16": 1e-4, "int8": 2e-3, "int4": 4e-2}[row_dtype]
        assert torch.allclose(attached(*batch), model()(*batch), atol=close)
        per_row = {"float16": 32, "int8": 20, "int4": 12}[row_dtype]
        assert publication.memory_bytes()["tables"] == 303 * per_row
        attached.close()


def test_bare_modules_and_sequences(name: str) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = EmbeddingConfig(name="s", embedding_dim=8, num_embeddings=20, feature_names=["s"])
        return nn.ModuleDict({
            "bag": nn.EmbeddingBag(30, 4, mode="mean"), "row": nn.Embedding(20, 6, padding_idx=2),
            "norm": nn.BatchNorm1d(4), "seq": EmbeddingCollection(tables=[config])})

    class Model(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.parts = make(seed)

        def forward(self, ids: torch.Tensor, kjt: KeyedJaggedTensor) -> list[torch.Tensor]:
            p = self.parts
            return [p["norm"](p["bag"](ids)), p["row"](ids), p["seq"](kjt)["s"].values()]

    like, other = Model(0).eval(), Model(1).eval()
    ids = torch.tensor([[1, 2, 2], [0, 19, 3]])
    kjt = KeyedJaggedTensor.from_lengths_sync(["s"], torch.tensor([3, 4, 4]), torch.tensor([1, 2]))
    with oper.publish(like, name) as publication:
        attached = oper.attach(Model(5), name)
        for published in (like, other):
            publication.publish(published)
            for mine, theirs in zip(attached(ids, kjt), published(ids, kjt), strict=True):
                assert torch.equal(mine, theirs)
        attached.close()


def test_a_collection_alone(name: str, batch) -> None:
    collection = model().sparse_arch.embedding_bag_collection
    with oper.publish(collection, name):
        attached = oper.attach(model().sparse_arch.embedding_bag_collection, name)
        out = attached(batch[1])
        assert out.keys() == KEYS
        assert torch.equal(out.values(), collection(batch[1]).values())
        attached.close()


def test_invalid_weights_and_publications_are_refused(served, name: str, batch, tmp_path: Path
                                                      ) -> None:
    publication, attached = served
    wrong = dict(model().state_dict())
    wrong[next(k for k in wrong if "t1" in k)] = torch.zeros(5, 16)
    (tmp_path / "no.pt").write_bytes(b"nothing")
    for bad, error in ((nn.Linear(2, 2), InvalidInputError), ({"a": 1}, InvalidInputError),
                       (None, InvalidInputError),
                       (wrong, InvalidInputError), (model("meta"), InvalidInputError),
                       (tmp_path / "missing", FileFormatError),
                       (tmp_path / "no.pt", FileFormatError), (tmp_path, FileFormatError)):
        with pytest.raises(error):
            publication.publish(bad)
    assert attached.epoch == 1
    assert torch.equal(attached(*batch), model()(*batch))
    with pytest.raises(OperError, match="no running publisher"):
        oper.publish(model(), name)
    with pytest.raises(InvalidInputError, match="another model"):
        oper.attach(nn.EmbeddingBag(3, 4, mode="sum"), name)
    with pytest.raises(PlanError, match=r"publish table .*dim=1040, expected <= 1024"):
        oper.publish(nn.EmbeddingBag(3, 1040, mode="sum"), f"{name}-2")
    with pytest.raises(InvalidInputError, match="tables"):
        oper.publish(model(), f"{name}-2", row_dtype={"nowhere": "int8"})
    beyond = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.tensor([1, 2, 102]),
                                                 torch.tensor([1, 1, 1]))
    with pytest.raises(InvalidInputError, match=r"'f2' in table 't2': id=102"):
        attached(torch.zeros(1, 5), beyond)
    attached.close()
    with pytest.raises(OperError, match="not open"):
        attached(*batch)


@pytest.mark.parametrize("row_dtype", [None, "int8", {"t0": "int4", "t2": "float16"}])
def test_sharded_for_inference(row_dtype, name: str, batch) -> None:
    """`oper.shard` and `oper.publish` store and read rows in the same way."""
    with oper.publish(model(), name, row_dtype=row_dtype):
        attached = oper.attach(model(), name)
        sharded = oper.shard(model(), objective="inference", row_dtype=row_dtype)
        with torch.no_grad():
            assert torch.equal(sharded(*batch), attached(*batch))
        attached.close()


def test_a_quantised_model_is_sharded(batch) -> None:
    quantised = quantize_inference_model(model())
    expected = quantised(*batch)
    with torch.no_grad():
        assert torch.equal(oper.shard(quantised, objective="inference")(*batch), expected)
    with pytest.raises(InvalidInputError, match="quantised"):
        oper.shard(quantize_inference_model(model()), optimizer=oper.SGD(lr=0.1))
    with pytest.raises(InvalidInputError, match="row_dtype"):
        oper.shard(model(), optimizer=oper.SGD(lr=0.1), row_dtype="int8")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_damaged_rows_are_not_published(kind: str, served, batch, tmp_path: Path) -> None:
    """Both from a file of torch.save and from a checkpoint that torch wrote without OPER."""
    publication, attached = served
    before = attached(*batch)
    state = model(seed=4).state_dict()
    path = tmp_path / "weights.pt"
    if kind == "file":
        torch.save(state, path)
    else:
        dcp.save({"model": state}, checkpoint_id=tmp_path, no_dist=True)
        path = next(tmp_path.glob("*.distcp"))
    rows = next(v for v in state.values() if v.ndim == 2 and v.shape[0] > 50)
    damage_record(path, rows.numpy().tobytes())
    epoch = publication.epoch
    with pytest.raises(FileFormatError, match="CRC-32 of record"):
        publication.publish(path if kind == "file" else tmp_path)
    assert publication.epoch == epoch and torch.equal(attached(*batch), before)


def test_rows_have_types_by_hotness(batch, name) -> None:
    """For a float and a quantised model; deltas keep the dtypes."""
    counts = {f"t{i}": np.maximum(1, 3000 // np.arange(1, 101 + i) ** 2) for i in range(3)}
    stats = oper.AccessStats(3000, {t: oper.TableStats.from_counts(
        c.size, np.arange(c.size)[::-1].copy(), c, (np.array([1]), np.array([int(c.sum())])))
        for t, c in counts.items()})
    with oper.publish(model(), name, stats=stats, error_budget=4e-4) as publication:
        types = {t.table.name: [(x.stop, x.dtype or t.table.dtype) for x in t.tiers]
                 for t in publication.plan.tables}
        assert {d for ranges in types.values() for _, d in ranges} >= {"int8", "int4"}
        assert 0 < publication.plan.notes["row_error"] <= 4e-4
        served = oper.attach(model("meta"), name)
        exact = model()(*batch)
        assert not torch.equal(served(*batch), exact)
        assert (served(*batch) - exact).abs().max() < 0.05 * exact.std()
        # The numbers of a quantised model have types of their own as well.
        with oper.publish(quantize_inference_model(model()), f"{name}-q", stats=stats,
                          error_budget=4e-4) as other:
            assert any(x.dtype for t in other.plan.tables for x in t.tiers)
        changed = model(seed=4)
        rows = {f"t{i}": (np.arange(100 + i), bag.weight.detach()) for i, bag in enumerate(
            changed.sparse_arch.embedding_bag_collection.embedding_bags.values())}
        dense = {k: v for k, v in changed.state_dict().items() if "embedding_bags" not in k}
        publication.apply(rows, dense)
        by_rows = served(*batch)
        publication.publish(changed)
        assert torch.equal(served(*batch), by_rows)
        served.close()
    for more in ({"stats": None}, {"row_dtype": "int8"}):
        with pytest.raises(InvalidInputError, match="cannot choose row dtypes"):
            oper.publish(model(), name, **{"stats": stats, "error_budget": 1e-3, **more})
    with pytest.raises(InvalidInputError, match="stats='counts'"):
        oper.publish(model(), name, stats="counts", error_budget=1e-3)
    tiny = model()  # rows whose squares float32 does not hold, nor float16 the rows
    with torch.no_grad():
        for bag in tiny.sparse_arch.embedding_bag_collection.embedding_bags.values():
            bag.weight.mul_(1e-30)
    with pytest.raises(oper.PlanInfeasibleError, match="the error of the widest types"):
        oper.publish(tiny, name, stats=stats, error_budget=1e-3)


def test_copies_on_nodes_leave_memory_for_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes together have the memory of the host, of which tables take at most half."""
    rows, dim = 100_000, 16
    spec = TableSpec("t", rows, dim, ("f",), optimizer="none")
    counts = (1e7 / np.arange(1, rows + 1) ** 1.05).astype(np.int64)
    stats = AccessStats(10_000, {"t": TableStats.from_counts(
        rows, np.arange(rows), counts, (np.array([100]), np.array([int(counts.sum()) // 100])))})
    monkeypatch.setattr(inference, "find_nodes", lambda: [Node(k, (k,)) for k in range(4)])
    for memory, has_copies in ((8 * spec.num_bytes, True), (3 * spec.num_bytes, False)):
        monkeypatch.setattr(topology, "memory_bytes", lambda name, m=memory: m)
        tiers = inference._placed([spec], stats, None).table("t").tiers
        held = sum((t.stop - t.start) * spec.row_bytes * (
            len(t.ranks) if t.placement == "replicated" else 1) for t in tiers)
        assert 2 * held <= max(memory / 2, 2 * spec.num_bytes)
        assert (held > spec.num_bytes) == has_copies
        assert {t.mode for t in tiers} == {"pull"}  # workers read every row in place
