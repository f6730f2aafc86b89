"""The case ``sessions`` of ``oper bench data``: train on samples that share a session's bags."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oper.bench.core import record
from oper.bench.core.launch import Progress, Task, run_workers
from oper.bench.core.measure import aligner, over
from oper.bench.core.planning import gather, slowest
from oper.data import Folder, Loader, LoaderOptions, PreprocessOptions, preprocess
from oper.data.generate.ids import power_law_ids
from oper.data.generic import Choice, generic_recipe

WORLD_SIZE = 2
_BATCH, _DIM, _BATCHES = 2048, 64, 8
_ROUNDS, _PASSES = 10, 3  # rounds, and passes over each kind of batches per round
_SAMPLES, _HISTORY = 8, 30  # mean samples per session; items that each sample lists
_ITEMS, _SHOPS = 200_000, 20_000
_EXPONENT = 1.05
_OF_SESSION = ("user", "history", "shops")  # equal for all samples of a session


def sessions(num_rows: int, folder: Path) -> dict[str, Any]:
    """Embedding steps (lookups, backward, update) with each session's bags stored once per batch.

    A sample has one item, and its session's user, items and shops. ``duplication``: samples per
    distinct list of items in a rank's batch. ``ratio_step``: step time with all bags / step time
    with equal bags stored once, on the same samples and tables, interleaved. A step time is that of
    a pass over the batches divided by their number, so that ranks synchronise only within steps, as
    in training. ``duplication_alone``, ``ratio_step_alone``: for a log with one sample per session.
    ``verified``: pooled embeddings of both kinds of batches are bitwise equal.
    """
    found = {}
    for name, samples in (("", _SAMPLES), ("_alone", 1)):
        where = folder / f"sessions{name}"
        where.mkdir()
        _write_log(where / "log.csv", num_rows, samples)
        recipe = generic_recipe("csv", Choice(("user", "item", "history:|", "shops:|"),
                                              label="label"))
        preprocess(recipe, [str(where / "log.csv")], where / "out", PreprocessOptions(min_count=1))
        batch_size = max(1, min(_BATCH, num_rows // (4 * WORLD_SIZE)))
        found[name], = run_workers(
            [Task("sessions", _steps, (str(where / "out"), batch_size))], WORLD_SIZE)
    return {"verified": all(x.pop("bit_equal") for x in found.values()), "rows": num_rows,
            "ranks": WORLD_SIZE, "samples_per_session": _SAMPLES, "ids_per_list": _HISTORY,
            **{f"{key}{name}": value for name, x in found.items() for key, value in x.items()}}


def _write_log(path: Path, num_rows: int, samples: int) -> None:
    """Write a CSV log of consecutive sessions with `samples` samples on average."""
    rng = np.random.default_rng((7, samples))
    sizes = rng.geometric(1 / samples, num_rows)
    sizes = sizes[:int(np.searchsorted(np.cumsum(sizes), num_rows)) + 1]
    seen = power_law_ids(_ITEMS, sizes.size * _HISTORY, _EXPONENT, rng).reshape(-1, _HISTORY)
    items = iter(power_law_ids(_ITEMS, int(sizes.sum()), _EXPONENT, rng).tolist())
    with open(path, "w", encoding="utf-8") as file:
        file.write("label,user,item,history,shops\n")
        for user, (size, ids) in enumerate(zip(sizes.tolist(), seen, strict=True)):
            lists = ",".join("|".join(map(str, x.tolist())) for x in (ids, ids % _SHOPS))
            file.writelines(f"{k % 2},{user},{next(items)},{lists}\n" for k in range(size))


def _steps(progress: Progress, folder: str, batch_size: int) -> dict[str, Any]:
    """Time steps on a preprocessed log with all bags and with equal bags stored once, and compare
    the results of both kinds of batches. Collective.

    Args:
        progress: function that reports the current activity.
        folder: the preprocessed folder.
        batch_size: samples per rank and batch.
    """
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    import oper

    about = Folder.open(folder)
    model: Any = EmbeddingBagCollection([EmbeddingBagConfig(
        name=f"t_{name}", num_embeddings=rows, embedding_dim=_DIM, feature_names=[name])
        for name, rows in zip(about.sparse, about.num_rows, strict=True)])
    batches = {}
    for name, deduplicated in (("full", ()), ("once", _OF_SESSION)):
        loader = Loader(folder, "train", LoaderOptions(
            batch_size, 1 << 15, drop_last=True, group_by="user", deduplicate=deduplicated))
        batches[name] = [b.sparse_features for b in itertools.islice(loader, _BATCHES)]
    model = oper.shard(model, oper.collect(batches["full"], model),
                       optimizer=oper.RowWiseAdagrad(lr=0.01))
    count, at = len(batches["full"]), about.sparse.index("history")
    is_equal, distinct = True, 0
    for full, once in zip(batches["full"], batches["once"], strict=True):
        with torch.no_grad():
            is_equal &= torch.equal(model(full).values(), model(once).values())
        distinct += once.stride_per_key()[at]
    gradient = torch.randn(batch_size, _DIM * len(about.sparse),
                           generator=torch.Generator().manual_seed(0))

    def train(batches: Sequence[Any]) -> None:
        for features in batches:
            out = model(features).values()
            out.backward(gradient[:out.shape[0]])

    progress("steps with all bags, and with those of a session once")
    spent = record.interleave({name: over([given], train) for name, given in batches.items()},
                              aligner(model.tables), _ROUNDS, _PASSES)
    # A pass takes as long as on its slower rank.
    full_s, once_s = (float(np.median(slowest(spent[name].tolist()))) / count for name in batches)
    return {"bit_equal": all(gather(is_equal)), "duplication": count * batch_size / distinct,
            "full_step_ms": 1e3 * full_s, "once_step_ms": 1e3 * once_s,
            "ratio_step": full_s / once_s}
