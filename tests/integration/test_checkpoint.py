"""Checkpoints by torch.distributed.checkpoint: any plan, ranks, types of rows; grown tables.

Weights and optimizer state are saved in logical order; what loads them need not know who saved.
"""

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.errors import FileFormatError, InvalidInputError, OperError
from oper.integration.checkpoint.files import CHECKSUMS, check_archive
from oper.integration.checkpoint.on_demand import TableRows
from oper.integration.checkpoint.weights import extra_value
from oper.integration.torchrec_modules import table_specs
from oper.messages import MessageBits
from tests.checkpoint_support import (
    CHUNK,
    Model,
    batch_of,
    flat,
    go_on,
    random_kjt,
    read,
    restore,
    run_ranks,
    sharded,
)
from tests.random_plans import mixed_plan, rich_plan
from tests.runtime_support import assert_bitwise, assert_near
from tests.support import damage_record
from tests.world_support import RankFailedError, run_world


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a checkpoint of two ranks after three steps, and its contents."""
    folder = tmp_path_factory.mktemp("saved") / "two"
    return folder, run_ranks(go_on, 2, 1, range(3), None, str(folder), None)


@pytest.fixture(scope="module")
def unbroken() -> dict[str, torch.Tensor]:
    """Return the state of the two ranks after six steps."""
    return run_ranks(go_on, 2, 1, range(6))


@pytest.fixture(scope="module")
def in_chunks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return the same, saved by `oper.save_checkpoint` under a plan with push and columns."""
    folder = tmp_path_factory.mktemp("in_chunks") / "two"
    return folder, run_ranks(go_on, 2, 101, range(3), None, str(folder))


# ---- names and shapes ----------------------------------------------------------------------------


def test_names_and_shapes_are_the_unsharded_ones() -> None:
    plain, model = Model(), sharded(1, 0)
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert_bitwise(model.state_dict()[name], value, name)
    fused = model.bags.fused_optimizer.state_dict()["state"]
    assert {name: {k: tuple(v.shape) for k, v in part.items()} for name, part in fused.items()} == {
        "embedding_bags.ta.weight": {"ta.momentum1": (37,)},
        "embedding_bags.tb.weight": {"tb.momentum1": (1, 8), "tb.exp_avg_sq": (1, 8),
                                     "tb.step": ()},
        "embedding_bags.tc.weight": {"tc.momentum1": (500, 8), "tc.exp_avg_sq": (500,),
                                     "tc.step": ()}}
    (of_items,) = model.items.fused_optimizer.state_dict()["state"].values()
    assert {k: tuple(v.shape) for k, v in of_items.items()} == {"ts.momentum_buffer": (60, 8)}


def test_the_state_dict_helpers_of_torch() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, other = sharded(1, 0), sharded(1, 1, seed=5)
    state = get_model_state_dict(model)
    assert list(state) == list(model.state_dict())
    set_model_state_dict(other, state)
    assert_bitwise(dict(other.state_dict()), dict(model.state_dict()), "state")


# ---- training goes on ----------------------------------------------------------------------------


@pytest.mark.parametrize("how, plan, others", [("saved", 1, (1, 3)), ("in_chunks", 101, (101,))])
def test_two_ranks_resume_bitwise(how: str, plan: int, others: tuple[int, ...],
                                  request: pytest.FixtureRequest) -> None:
    folder, _ = request.getfixturevalue(how)
    chunk = CHUNK if how == "in_chunks" else None
    want = (request.getfixturevalue("unbroken") if plan == 1
            else run_ranks(go_on, 2, plan, range(6)))
    for other in others:
        got = run_ranks(go_on, 2, other, range(3, 6), str(folder), None, chunk)
        assert_bitwise(got, want, f"plan {other}")


@pytest.mark.parametrize("how, world_size, plan", [
    ("saved", 1, 5), ("saved", 4, 2), ("in_chunks", 1, 2), ("in_chunks", 4, 103)])
def test_another_world_size_resumes(how: str, world_size: int, plan: int, tmp_path: Path,
                                    request: pytest.FixtureRequest) -> None:
    folder, held = request.getfixturevalue(how)
    chunk, place = CHUNK if how == "in_chunks" else None, str(tmp_path / "there")
    there = run_ranks(go_on, world_size, plan, range(3, 3), str(folder), place, chunk)
    assert_bitwise(there, held, "loaded by another world")
    back = run_ranks(go_on, 2, 1, range(3, 3), place, None, chunk)
    assert_bitwise(back, held, "and back")
    if how == "saved":
        assert_near(run_ranks(go_on, world_size, plan, range(3, 6), str(folder), None, None),
                    request.getfixturevalue("unbroken"), "training")


def test_a_chunked_checkpoint_is_readable_without_oper(in_chunks: Any) -> None:
    folder, held = in_chunks
    found = read(folder)
    stored = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    chunks = stored["model.bags.embedding_bags.tc.weight"].chunks
    assert sorted(c.sizes[0] for c in chunks) == [4] + 31 * [16]
    assert not [p for p in folder.parent.iterdir() if p != folder]
    names = {"/" + k.replace(".", "/"): v for k, v in found.items()}
    for name, value in held.items():
        # `places` is a bare module: its state stands under "tables" and its path.
        key = name.replace("/places/", "/tables/places/").replace(".", "/")
        assert_bitwise(names["/" + key.lstrip("/")], value, name)


# ---- the unsharded model -------------------------------------------------------------------------


def _plain_weights(rank: int, world_size: int, load: str, save: str) -> dict[str, torch.Tensor]:
    """``dcp.save(model.state_dict())`` without OPER's planners."""
    model = sharded(world_size, 4, seed=7)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=load)
    model.load_state_dict(state)
    dcp.save(model.state_dict(), checkpoint_id=save)
    return flat(dict(model.state_dict()))


def _with_planners(rank: int, world_size: int, load: str, save: str) -> dict[str, torch.Tensor]:
    """Checkpoints of torch.distributed.checkpoint from and to programs without OPER."""
    model = sharded(world_size, 102, seed=7)
    with oper.rows_on_demand(512):  # bytes: most tables are several chunks
        state = model.state_dict()
        assert isinstance(state["places.weight"], TableRows)
        dcp.load(state, checkpoint_id=load, planner=oper.LoadPlanner())
        model.load_state_dict(state)
        dcp.save(model.state_dict(), checkpoint_id=save, planner=oper.SavePlanner())
    return flat(dict(model.state_dict()))


@pytest.mark.parametrize("body", [_plain_weights, _with_planners])
@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_from_and_to_the_unsharded_model(world_size: int, body: Callable[..., Any],
                                                 tmp_path: Path) -> None:
    plain, other = Model(seed=3), Model(seed=4)
    dcp.save(plain.state_dict(), checkpoint_id=str(tmp_path / "in"), no_dist=True)
    want = flat(dict(plain.state_dict()))
    for got in run_world(world_size, body, str(tmp_path / "in"), str(tmp_path / "out")):
        assert_bitwise(got, want, "loaded from the unsharded model")
    state = other.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    other.load_state_dict(state)
    assert_bitwise(flat(dict(other.state_dict())), want, "loaded by the unsharded model")


def test_optimizer_state_from_and_to_an_unsharded_optimizer(saved: Any) -> None:
    """torch's Adagrad and TorchRec's row-wise one continue from OPER's state, and vice versa."""
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    folder, _ = saved
    found = read(folder)
    plain, model = Model(seed=8), sharded(1, 0, seed=9)
    plain.load_state_dict({n: found[f"model.{n}"] for n in plain.state_dict()})
    restore(model, str(folder))
    ta, places = plain.bags.embedding_bags["ta"].weight, plain.places.weight
    rowwise = RowWiseAdagrad([ta], lr=0.1, eps=1e-8)
    adagrad = torch.optim.Adagrad([places], lr=0.1, eps=1e-2)
    key = "optimizer.state.bags.embedding_bags.ta.weight.ta.momentum1"
    rowwise.state[ta]["sum"].copy_(found[key].view_as(rowwise.state[ta]["sum"]))
    adagrad.state[places]["sum"].copy_(found["places.state.weight.weight.momentum1"])
    for m in (plain, model):
        m(batch_of(3, 0, 1)).backward()
    rowwise.step()
    adagrad.step()
    assert_near({"ta": model.state_dict()["bags.embedding_bags.ta.weight"],
                 "places": model.state_dict()["places.weight"],
                 "ta state": model.bags.fused_optimizer.state_dict()["state"][
                     "embedding_bags.ta.weight"]["ta.momentum1"],
                 "places state": model.places.optimizer_state_dict()["state"]["weight"][
                     "weight.momentum1"]},
                {"ta": ta.detach(), "places": places.detach(),
                 "ta state": rowwise.state[ta]["sum"].flatten(),
                 "places state": adagrad.state[places]["sum"]}, "OPER and torch")


# ---- what is refused -----------------------------------------------------------------------------


def test_ranks_survive_a_failed_load(saved: Any) -> None:
    with pytest.raises((RankFailedError, InvalidInputError)):
        run_ranks(go_on, 2, 1, range(0), str(saved[0]) + "-none", None, None)
    run_ranks(go_on, 2, 1, range(0), str(saved[0]), None, None)


def test_extra_values_of_damaged_checkpoints_are_none(tmp_path: Path) -> None:
    """torch raises a BaseException, which would end a server that watches the folder."""
    folder = tmp_path / "one"
    dcp.save({"extra": {"numbering": "abc"}}, checkpoint_id=folder, no_dist=True)
    assert extra_value(folder, "numbering") == "abc"
    assert extra_value(folder, "step") is None
    for path in folder.glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    assert extra_value(folder, "numbering") is None
    assert extra_value(tmp_path / "missing", "numbering") is None


# ---- rows of 16 bits -----------------------------------------------------------------------------

TYPES = {"a": DataType.FP16, "b": DataType.FP32, "c": DataType.BF16}
SIZES = {"a": 37, "b": 1, "c": 500}


def collection(seed: int) -> EmbeddingBagCollection:
    torch.manual_seed(seed)
    return EmbeddingBagCollection([EmbeddingBagConfig(
        name=f"t{f}", num_embeddings=SIZES[f], embedding_dim=8, feature_names=[f], data_type=t)
        for f, t in TYPES.items()])


def go_on_in_half(rank: int, world_size: int, plan: int, steps: range, load: str | None,
                  save: str | None, bits: int = 32, delta: bool = False) -> dict[str, torch.Tensor]:
    """Load, train and save; with `delta`, the last step's changes as a delta."""
    bags = collection(0 if load is None else 9)
    kinds = {f"t{f}": "rowwise_adagrad" for f in TYPES}
    layout = rich_plan(table_specs(bags, kinds), world_size, plan, columns=True)
    layout = replace(layout, message_bits=MessageBits(bits, bits))
    model: Any = oper.shard(bags, plan=layout, optimizer=oper.RowWiseAdagrad(lr=0.1))
    if load is not None:
        oper.load_checkpoint(load, model, model.fused_optimizer)
    saver = oper.DeltaCheckpoints(save, model, model.fused_optimizer) if save and delta else None
    for step in steps:
        if saver is not None and step == steps[-1]:
            saver.save_full(step)
        model(batch_of(step, rank, world_size)).values().float().square().sum().backward()
    if saver is not None:
        saver.save(steps.stop)
        saver.close()
    elif save is not None:
        oper.save_checkpoint(save, model, model.fused_optimizer, chunk_bytes=512)
        state = {"plain": dict(model.state_dict())}
        dcp.save(state, checkpoint_id=save + "-plain", no_dist=world_size == 1)
    return flat({"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()})


@pytest.mark.parametrize("labels, plan", [("a", 3), ("aa", 102), ("ab", 104)])
def test_16_bit_rows_move_between_plans_and_hosts(labels: str, plan: int, tmp_path: Path) -> None:
    """Two ranks save; one, two under another plan, and two that share no memory load."""
    first = str(tmp_path / "first")
    held = run_ranks(go_on_in_half, 2, 101, range(3), None, first)
    dtypes = {v.dtype for v in held.values()}
    assert {torch.float16, torch.bfloat16, torch.float32} <= dtypes
    again = str(tmp_path / "again")
    there = run_ranks(go_on_in_half, len(labels), plan, range(3, 3), first, again,
                      labels=labels)
    assert_bitwise(there, held, "loaded by others")
    assert_bitwise(run_ranks(go_on_in_half, 2, 101, range(3, 3), again, None), held, "and back")
    # Plain calls of a program that OPER is no part of. (TorchRec makes fp16 of its bf16 tables.)
    rows = {k.removeprefix("/model/"): v for k, v in held.items() if k.startswith("/model/")}
    state = {"plain": {k: torch.empty_like(v) for k, v in rows.items()}}
    dcp.load(state, checkpoint_id=again + "-plain", no_dist=True)
    assert_bitwise(state["plain"], rows, "read without OPER")


@pytest.mark.parametrize("labels", ["aa", "ab"])
def test_random_rounding_continues(labels: str, tmp_path: Path) -> None:
    """A resumed run draws the numbers of the uninterrupted one, for its 16-bit rows and, between
    hosts, its messages of 8 bits, also if the program has another seed."""
    folder, between = str(tmp_path / "saved"), 8 if labels == "ab" else 32
    want = run_ranks(go_on_in_half, 2, 101, range(5), None, None, between, labels=labels)
    run_ranks(go_on_in_half, 2, 101, range(3), None, folder, between, labels == "ab", labels=labels)
    got = run_ranks(go_on_in_half, 2, 101, range(3, 5), folder, None, between, labels=labels)
    assert_bitwise(got, want, "resumed")


def test_a_checkpoint_without_counts_of_updates(tmp_path: Path) -> None:
    """The count of a state with steps is kept; other programs save no other one."""
    saved, loaded = (oper.shard(collection(k), optimizer=oper.Adam(lr=0.1)) for k in range(2))
    saved(batch_of(0, 0, 1)).values().sum().backward()
    dcp.save({"model": saved.state_dict(), "optimizer": saved.fused_optimizer.state_dict()},
             checkpoint_id=tmp_path / "plain")
    oper.load_checkpoint(tmp_path / "plain", loaded, loaded.fused_optimizer)
    assert loaded.tables.num_steps == loaded.tables.table_steps("tc") == 1


# ---- tables that grow between runs ---------------------------------------------------------------

OLD, NEW = {"a": 40, "b": 7}, {"a": 55, "b": 8}
OPTIMIZERS = {"adam": oper.Adam(lr=0.05), "adagrad": oper.RowWiseAdagrad(lr=0.1)}


def model_of(rows: dict[str, int], world_size: int, kind: str) -> Any:
    """Return a sharded model whose tables' first rows do not depend on the number of rows."""
    bags = EmbeddingBagCollection([EmbeddingBagConfig(
        name=f"t{n}", num_embeddings=r, embedding_dim=8, feature_names=[n])
        for n, r in rows.items()])
    with torch.no_grad():
        for n, r in rows.items():
            torch.manual_seed(ord(n))
            bags.embedding_bags[f"t{n}"].weight.copy_(torch.randn(NEW[n], 8)[:r])
    specs = table_specs(bags, {f"t{n}": kind for n in rows})
    return oper.shard(bags, plan=mixed_plan(specs, world_size, 3), optimizer=OPTIMIZERS[kind])


def train(bags: Any, rows: dict[str, int], rank: int, world_size: int, steps: range) -> None:
    for step in steps:
        kjt = random_kjt(rows, 6, 17 * step + rank)
        (bags(kjt).values().tanh().sum() / 6).backward()


def both(rank: int, world_size: int, folder: str, kind: str) -> dict[str, torch.Tensor]:
    whole = model_of(NEW, world_size, kind)
    train(whole, OLD, rank, world_size, range(4))
    train(whole, NEW, rank, world_size, range(4, 8))
    first = model_of(OLD, world_size, kind)
    train(first, OLD, rank, world_size, range(4))
    oper.save_checkpoint(folder, first, first.fused_optimizer, {"step": 4}, chunk_bytes=256)
    second = model_of(NEW, world_size, kind)
    with pytest.raises(OperError, match="grown=True"):
        oper.load_checkpoint(folder, second, second.fused_optimizer)
    assert oper.load_checkpoint(folder, second, second.fused_optimizer, grown=True) == {"step": 4}
    train(second, NEW, rank, world_size, range(4, 8))
    small = model_of(OLD, world_size, kind)
    oper.save_checkpoint(f"{folder}-new", second, second.fused_optimizer)
    with pytest.raises(OperError, match="or fewer rows"):
        oper.load_checkpoint(f"{folder}-new", small, small.fused_optimizer, grown=True)
    return {f"{name}/{key}": value for name, model in (("whole", whole), ("second", second))
            for key, value in flat({"model": model.state_dict(),
                                    "optimizer": model.fused_optimizer.state_dict()}).items()}


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_resumes_with_more_rows(world_size: int, kind: str, tmp_path: Path) -> None:
    found = run_ranks(both, world_size, str(tmp_path / "saved"), kind)
    names = {n.removeprefix("whole/") for n in found if n.startswith("whole/")}
    assert any("exp_avg_sq" in n or "momentum1" in n for n in names)
    for name in names:
        assert_bitwise(found[f"second/{name}"], found[f"whole/{name}"], name)


def renumbered(rank: int, world_size: int, folder: str, kind: str) -> dict[str, torch.Tensor]:
    """Loading with a re-map and renumbering a model both equal permuted tables."""
    small, plain, large = (model_of(r, world_size, kind) for r in (OLD, NEW, NEW))
    train(small, OLD, rank, world_size, range(4))
    oper.save_checkpoint(folder, small, small.fused_optimizer, chunk_bytes=256)
    oper.load_checkpoint(folder, plain, plain.fused_optimizer, grown=True)
    rng = np.random.default_rng(5)
    remap = {n: np.append(0, 1 + rng.permutation(r - 1)).astype(np.int32) for n, r in NEW.items()}
    if rank == 0:
        (Path(folder).parent / "remap").mkdir()
        for name, rows in remap.items():
            np.save(Path(folder).parent / "remap" / f"{name}.npy", rows)
    wanted = states(plain)
    for name, value in wanted.items():  # row r goes to row remap[r]
        order = np.argsort(next(m for n, m in remap.items() if f"t{n}" in name))
        wanted[name] = value if value.dim() == 0 else value[torch.from_numpy(order)]
    parent = str(Path(folder).parent)
    oper.load_checkpoint(folder, large, large.fused_optimizer, remap=parent)
    with pytest.raises(OperError, match="num_rows"):
        oper.load_checkpoint(folder, small, small.fused_optimizer, remap=parent)
    oper.migrate(plain, mixed_plan([*plain.tables.specs.values()], world_size, 7), remap=parent)
    for model in (plain, large):
        for name, value in states(model).items():
            assert_bitwise(value, wanted[name], name)
    with torch.no_grad():  # lookups, from replicas too, find old rows by their new numbers
        ids = torch.cat([torch.from_numpy(m).long()[:7] for m in remap.values()])
        kjt = KeyedJaggedTensor(list(NEW), ids, lengths=torch.ones(14, dtype=torch.int32))
        looked = {"moved/looked": plain(kjt).values().clone(),
                  "loaded/looked": large(kjt).values().clone()}
    train(plain, NEW, rank, world_size, range(4, 6))
    train(large, NEW, rank, world_size, range(4, 6))
    return looked | {f"{name}/{k}": v for name, model in (("moved", plain), ("loaded", large))
                     for k, v in states(model).items()}


def states(model: Any) -> dict[str, torch.Tensor]:
    return flat({"model": model.state_dict(),
                 "optimizer": model.fused_optimizer.state_dict()["state"]})


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_remap_renumbers_rows(world_size: int, kind: str, tmp_path: Path) -> None:
    found = run_ranks(renumbered, world_size, str(tmp_path / "saved"), kind)
    for name in (n.removeprefix("loaded/") for n in found if n.startswith("loaded/")):
        assert_bitwise(found[f"moved/{name}"], found[f"loaded/{name}"], name)


# ---- damaged files of torch.save -----------------------------------------------------------------


def test_every_flipped_bit_inside_a_record_is_found() -> None:
    """torch itself loads most of these files without an error."""
    data = io.BytesIO()
    torch.save({"weight": torch.arange(40.0), "steps": 3}, data)
    whole = data.getvalue()
    check_archive(io.BytesIO(whole), "cannot read it")
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        records = [(r.filename, archive.read(r)) for r in archive.infolist()]
    tried = loaded = 0
    for name, content in records:
        begin = whole.index(content, whole.index(name.encode()))
        for at in range(begin, begin + len(content), 4):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            with pytest.raises(FileFormatError, match=r"cannot read it: CRC-32 of record="):
                check_archive(io.BytesIO(damaged), "cannot read it")
            tried += 1
            try:
                torch.load(io.BytesIO(damaged), weights_only=True)
                loaded += 1
            except Exception:  # torch raises whatever the bytes mean
                continue
    assert tried > 80 and loaded > 40


@pytest.mark.parametrize("size", [0, 30, 200, -1, -40])
def test_a_truncated_archive_is_refused(size: int) -> None:
    data = io.BytesIO()
    torch.save({"weight": torch.arange(40.0)}, data)
    with pytest.raises(FileFormatError, match="damaged or of another kind"):
        check_archive(io.BytesIO(data.getvalue()[:size]), "cannot read it")


def test_an_archive_without_checksums_is_refused() -> None:
    data = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.arange(40.0)}, data)
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(FileFormatError, match=r"set_crc32_options\(True\)"):
        check_archive(data, "cannot read it")


@pytest.mark.parametrize("chunk_bytes", [256, 64 << 20])
def test_a_checkpoint_without_a_checksum_file_is_verified(chunk_bytes: int, tmp_path: Path) -> None:
    """Checkpoints that torch wrote without OPER, in which every value is an archive."""
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(64, 8), torch.nn.Linear(8, 1))
    rows = model[0].weight.detach().clone()
    oper.shard(model, plan=None, optimizer=oper.SGD())
    oper.save_checkpoint(tmp_path / "c", model, chunk_bytes=chunk_bytes)
    (tmp_path / "c" / CHECKSUMS).unlink()
    oper.load_checkpoint(tmp_path / "c", model)
    file = next((tmp_path / "c").glob("*.distcp"))
    damage_record(file, rows[:8].numpy().tobytes())
    with pytest.raises(FileFormatError, match=r"distcp: CRC-32 of record"):
        oper.load_checkpoint(tmp_path / "c", model)
    assert torch.equal(model.state_dict()["0.weight"], rows), "the tables are untouched"
