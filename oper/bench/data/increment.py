"""The case ``increment`` of ``oper bench data``: preprocess a day with a finished vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oper.bench.core import child
from oper.bench.data.cases import log_file, to_parquet
from oper.data import Folder, Loader, LoaderOptions
from oper.data.vocabulary.finished import extend

_DIM, _BATCHES, _BATCH_SIZE, _ROUNDS = 8, 16, 512, 3


def increment(num_rows: int, folder: Path) -> dict[str, Any]:
    """Preprocess a second day with the first day's vocabulary, compared with preprocessing both.

    The days are the halves of one log, whose hot values change. ``ratio_time`` is the ratio of the
    two ways' median times over alternating single-threaded runs. ``verified``: every value of day 1
    keeps its row with the extended vocabulary; day 2 uses these rows; and a model that trains on
    day 1, is saved, and continues on day 2 with extended tables is bitwise equal to one that had
    all rows from the start.
    """
    days = _halves(log_file(folder, num_rows), folder)
    one, two, both, wider, first, again = (
        folder / n for n in ("d1", "d2", "both", "v2", "d1x", "d2x"))
    _preprocess(one, days[:1])
    seconds: dict[str, list[float]] = {"increment": [], "anew": []}
    unseen: dict[str, Any] = {}
    for _ in range(_ROUNDS):
        found = _preprocess(two, days[1:], one)
        seconds["increment"].append(found["seconds"])
        unseen = found["value"]["unseen"]
        seconds["anew"].append(_preprocess(both, days)["seconds"])
    manifest = extend(one, [two], wider)
    _preprocess(first, days[:1], wider)
    _preprocess(again, days[1:], wider)
    unchanged = _rows_stay(one, first) and _rows_stay(two, again)
    continued = _continued(one, again, folder / "saved")
    medians = {n: float(np.median(s)) for n, s in seconds.items()}
    return {"verified": unchanged and continued, "rows_unchanged": unchanged,
            "training_continued": continued, "rows": num_rows,
            "ratio_time": medians["increment"] / medians["anew"],
            "increment_s": medians["increment"], "anew_s": medians["anew"],
            "unseen_share": float(np.mean([u["share"] for u in unseen.values()])),
            "new_rows": sum(manifest["new_rows"].values())}


def _preprocess(target: Path, logs: Sequence[Path], vocabulary: Path | None = None
                ) -> dict[str, Any]:
    """Preprocess logs into training rows only; returns the result of `child.call`."""
    return child.call(to_parquet, [str(p) for p in logs], str(target), {
        "vocabulary": vocabulary and str(vocabulary), "valid": "0", "force": True})


def _halves(log: Path, folder: Path) -> list[Path]:
    """Split a log at a line break near its middle; returns the two files."""
    paths, text = [folder / "day1.txt", folder / "day2.txt"], log.read_bytes()
    middle = text.index(b"\n", len(text) // 2) + 1
    for path, half in zip(paths, (slice(middle), slice(middle, None)), strict=True):
        path.write_bytes(memoryview(text)[half])
    return paths


def _rows_stay(old: Path, new: Path) -> bool:
    """Whether a log preprocessed with a vocabulary (`old`) and with its extension (`new`) has equal
    rows, except where `old` has row 0 (unknown) and `new` an added row."""
    first, second = Folder.open(old), Folder.open(new)
    if [p.name for p in first.parts("train")] != [p.name for p in second.parts("train")]:
        return False
    limits = dict(zip(first.sparse, first.num_rows, strict=True))
    for a, b in zip(first.parts("train"), second.parts("train"), strict=True):
        tables = first.read_part(a, first.sparse), second.read_part(b, second.sparse)
        for name, limit in limits.items():
            x, y = (t.column(name).to_numpy() for t in tables)
            if not ((x == y) | ((x == 0) & (y >= limit))).all():
                return False
    return True


def _continued(first: Path, second: Path, saved: Path) -> bool:
    """Whether training that extends its tables between the days is bitwise equal to training with
    all rows from the start."""
    import oper

    days = [Loader(d, "train", LoaderOptions(_BATCH_SIZE, drop_last=True, rank=0, world_size=1))
            for d in (first, second)]
    small, large = (dict(zip(d.folder.sparse, d.folder.num_rows, strict=True)) for d in days)
    whole, part, wider = (_model(rows, large) for rows in (large, small, large))
    for bags, day in ((whole, 0), (whole, 1), (part, 0)):
        _train(bags, days[day])
    oper.save_checkpoint(saved, part, part.fused_optimizer)
    oper.load_checkpoint(saved, wider, wider.fused_optimizer, grown=True)
    _train(wider, days[1])
    states = [{**m.state_dict(), **{f"{n}/{k}": v for n, s in m.fused_optimizer.state_dict()[
        "state"].items() for k, v in s.items()}} for m in (whole, wider)]
    return set(states[0]) == set(states[1]) and all(
        torch.equal(states[0][n], states[1][n]) for n in states[0])


def _model(rows: dict[str, int], largest: dict[str, int]) -> Any:
    """An embedding bag per column, sharded over this process only. Initial rows do not depend on
    their number, `rows`: they are the first of `largest`."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    import oper

    bags = EmbeddingBagCollection([EmbeddingBagConfig(
        name=f"t_{n}", num_embeddings=r, embedding_dim=_DIM, feature_names=[n])
        for n, r in rows.items()])
    with torch.no_grad():
        for k, (n, r) in enumerate(rows.items()):
            start = torch.randn(largest[n], _DIM, generator=torch.Generator().manual_seed(k))
            bags.embedding_bags[f"t_{n}"].weight.copy_(start[:r])
    return oper.shard(bags, optimizer=oper.RowWiseAdagrad(lr=0.05))


def _train(bags: Any, loader: Loader) -> None:
    for batch in itertools.islice(loader, _BATCHES):
        logits = bags(batch.sparse_features).values().sum(1)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
