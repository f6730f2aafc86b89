"""Tables that grow between runs give the results of a run with all rows from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.errors import OperError
from oper.integration.torchrec_modules import table_specs
from tests.checkpoint_support import flat, random_kjt, run_ranks
from tests.runtime_support import assert_bitwise, mixed_plan

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
