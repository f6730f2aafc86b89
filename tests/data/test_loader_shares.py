"""Loaders with ``share="batches"``: the same global batches for every number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oper.data import Loader, LoaderOptions, PreprocessOptions, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.errors import InvalidInputError

ROWS = 611


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with row numbers in its dense column, single ids and bags."""
    path = tmp_path_factory.mktemp("shares")
    with (path / "log.csv").open("w") as file:
        file.write("y,n,a,b\n")
        for k in range(ROWS):
            bag = "|".join(f"b{j % 13}" for j in range(k, k + k % 4))
            file.write(f"{k % 2},{k},a{k % 29},{bag}\n")
    preprocess(generic_recipe("csv", Choice(["a", "b:|"], "y", ["n"])), [str(path / "log.csv")],
               path / "out", PreprocessOptions(valid="0", row_group_rows=70, min_count=1))
    return path / "out"


def epoch(folder: Path, rank: int, world_size: int, number: int, **options: Any) -> list[Any]:
    loader = Loader(folder, "train", LoaderOptions(
        60 // world_size, rank=rank, world_size=world_size, share="batches", **options))
    loader.set_epoch(number)
    return list(loader)


@pytest.mark.parametrize("options", [{"window": 130}, {"window": 0}, {"window": 1, "seed": 4},
                                     {"window": 130, "drop_last": True}])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_same_global_batches(folder: Path, options: dict[str, Any], world_size: int) -> None:
    one = epoch(folder, 0, 1, 2, **options)
    ranks = [epoch(folder, r, world_size, 2, **options) for r in range(world_size)]
    assert {len(r) for r in ranks} == {len(one)}
    for whole, *parts in zip(one, *ranks, strict=True):
        sizes = [p.labels.numel() for p in parts]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
        for name in ("labels", "dense_features"):
            assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
        for key in ("a", "b"):
            for what in ("values", "lengths"):
                joined = torch.cat([getattr(p.sparse_features[key], what)() for p in parts])
                assert torch.equal(joined, getattr(whole.sparse_features[key], what)())
    seen = [int(n) for b in one for n in b.dense_features[:, 0]]
    kept = ROWS // 60 * 60 if options.get("drop_last") else ROWS
    assert len(seen) == len(set(seen)) == kept
    assert (seen == list(range(ROWS))) == (options["window"] == 0)


def test_a_state_of_another_number_of_ranks(folder: Path) -> None:
    whole = epoch(folder, 0, 1, 3)
    loader = Loader(folder, "train", LoaderOptions(60, rank=0, world_size=1, share="batches"))
    loader.set_epoch(3)
    state = loader.state_dict(4)
    for rank in range(2):
        other = Loader(folder, "train", LoaderOptions(30, rank=rank, world_size=2,
                                                      share="batches"))
        other.load_state_dict(state)
        rest = [b.labels for b in other]
        parts = [b.labels.tensor_split(2)[rank] for b in whole[4:]]
        assert all(map(torch.equal, rest, parts)) and len(rest) == len(whole) - 4
    with pytest.raises(InvalidInputError, match="share"):
        Loader(folder, "train", LoaderOptions(60, rank=0, world_size=1)).load_state_dict(state)
    with pytest.raises(InvalidInputError, match=r"one of .*rows.*batches"):
        LoaderOptions(60, share="all")
