"""Quality on logs whose ids drift: dynamic tables, hashing, and a vocabulary of the first day.

Batches are in time order, and each is scored before training on it (progressive validation). The
reported AUC is the mean over the days after the first. Contenders only differ in the mapping from
raw keys to rows.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import oper
from oper.analysis import forecast
from oper.bench.core.launch import Progress
from oper.bench.core.workload import data_files
from oper.data import (
    Folder,
    Loader,
    LoaderOptions,
    PreprocessOptions,
    SyntheticLog,
    analyze_folder,
    load_recipe,
    preprocess,
    write_synthetic_log,
)
from oper.data.generic import Choice, generic_recipe
from oper.data.recipe import Recipe
from oper.data.vocabulary.building import hash_values
from oper.rl_rec.intervals import bootstrap, difference
from oper.shmem.keys.directories import directory_bytes
from oper.stats import AccessStats
from oper.train.metrics import auc

FIRST_DAY, HASHED = "first day", "hashed"
# Eviction rules of the contenders with dynamic tables.
RULES = {"lru": oper.DynamicTable(), "lfu": oper.DynamicTable(eviction="lfu", half_life=1000),
         "distance_lfu": oper.DynamicTable(eviction="distance_lfu")}
FIGURES = ((*(f"auc_over.{n}.{o}" for n in RULES for o in (HASHED, FIRST_DAY)),
            *(f"auc.{n}" for n in (*RULES, HASHED, FIRST_DAY)), "samples", "days"),)
_STATE_BYTES = 4  # row-wise Adagrad's state per row
_DAY_S = 86_400
Map = Callable[[np.ndarray], np.ndarray]  # from keys [n] to rows, int [n]
_BULK = 12.0  # a line of Online Retail has label 1 if its quantity is at least this


@dataclass(frozen=True, slots=True)
class DriftCase:
    """Comparison on one log.

    Attributes:
        name: name of the log.
        share: rows of a dynamic table per distinct key of the log.
        num_seeds: number of runs of each contender, with different initial weights.
        dim: columns of each table.
        batch_size: samples per step.
        num_rows: rows of the synthetic log.
    """

    name: str
    share: float = 0.25
    num_seeds: int = 3
    dim: int = 16
    batch_size: int = 128
    num_rows: int = 60_000

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Score and train on the log; returns the record's entry."""
        with tempfile.TemporaryDirectory(prefix="oper-drift-") as folder:
            log = _read(self, Path(folder))
        rows, maps = _contenders(self, log)
        daily: dict[str, list[np.ndarray]] = {name: [] for name in rows}
        missed: dict[str, list[list[float]]] = {name: [] for name in RULES}
        repeated = True
        for name, num_rows in rows.items():
            rule = RULES.get(name)
            batches = list(_mapped(log, maps[name])) if rule is None else log.batches
            for seed in range(1, self.num_seeds + 1):
                progress(f"{name}, seed {seed}")
                scores, shares = _score(self, log, batches, num_rows, seed, rule)
                daily[name].append(_by_day(scores, log))
                if rule is not None:
                    missed[name].append(shares)
                    if seed == 1:
                        again, _ = _score(self, log, batches, num_rows, seed, rule)
                        repeated &= bool((again == scores).all())
        tables = {name: np.stack(runs) for name, runs in daily.items()}
        stats = [log.stats.tables[n] for n in log.columns]
        return {
            "verified": repeated, "samples": int(log.labels.size),
            "days": int(tables[HASHED].shape[1]), "num_seeds": self.num_seeds, "dim": self.dim,
            "columns": list(log.columns), "keys": [t.num_touched_rows for t in stats],
            "num_rows": rows,
            "bytes": {n: sum(map(_num_bytes(self, n), of)) for n, of in rows.items()},
            "auc": {n: bootstrap(x).to_json() for n, x in tables.items()},
            "auc_over": {name: {n: difference(tables[name], tables[n]).to_json()
                                for n in (HASHED, FIRST_DAY)} for name in RULES},
            "default_share": {n: np.mean(x, axis=0) for n, x in missed.items()},
            "default_share_foreseen": {
                n: [forecast(t, r, eviction=rule.eviction).default_share
                    for t, r in zip(stats, rows[n], strict=True)] for n, rule in RULES.items()}}


@dataclass(frozen=True, slots=True)
class _Log:
    """A preprocessed log in order of time.

    Attributes:
        columns: names of the sparse columns.
        num_dense: number of dense columns.
        batches: batches of N rows in total.
        days: day of every row, int64 [N].
        labels: label of every row, [N].
        stats: access statistics.
    """

    columns: tuple[str, ...]
    num_dense: int
    batches: list[Any]
    days: np.ndarray
    labels: np.ndarray
    stats: AccessStats

    def keys(self, upto: int) -> list[np.ndarray]:
        """Keys of each column in the first `upto` rows."""
        found: list[list[np.ndarray]] = [[] for _ in self.columns]
        for batch in self.batches:
            left = min(upto, batch.labels.numel())
            if left <= 0:
                break
            for c, name in enumerate(self.columns):
                feature = batch.sparse_features[name]
                found[c].append(feature.values()[:int(feature.lengths()[:left].sum())].numpy())
            upto -= left
        return [np.concatenate(parts) for parts in found]


def cases(quick: bool) -> list[DriftCase]:
    """Cases for the synthetic log and, unless `quick`, the real logs whose files exist."""
    found = [DriftCase("synthetic"), *(DriftCase(name) for name in _FILES if _files(name))]
    return [DriftCase("synthetic", num_seeds=2, num_rows=8_000)] if quick else found


def _contenders(case: DriftCase, log: _Log) -> tuple[dict[str, list[int]], dict[str, list[Map]]]:
    """By contender: rows of each column's table and, for static tables, the map from keys to rows.
    Hashed tables have as many bytes as the dynamic ones with their directories."""
    stats = log.stats.tables
    dynamic = [1 + max(64, round(case.share * stats[n].num_touched_rows)) for n in log.columns]
    size, most = _num_bytes(case, HASHED), _num_bytes(case, "lru")
    hashed = [most(rows) // size(1) for rows in dynamic]
    first = log.keys(int((log.days == log.days[0]).sum()))
    known = [_hottest(keys, rows - 1) for keys, rows in zip(first, hashed, strict=True)]
    return ({**{name: dynamic for name in RULES}, HASHED: hashed,
             FIRST_DAY: [k.size + 1 for k in known]},
            {HASHED: [functools.partial(hash_values, num_rows=n) for n in hashed],
             FIRST_DAY: [functools.partial(_number, k) for k in known]})


def _num_bytes(case: DriftCase, contender: str) -> Callable[[int], int]:
    """A function from the number of rows of a contender's table to its bytes, including optimizer
    state and, for dynamic tables, the directory."""
    rule = RULES.get(contender)
    return lambda rows: rows * (4 * case.dim + _STATE_BYTES) + (
        directory_bytes(rows, rule) if rule else 0)


# ---- logs ----------------------------------------------------------------------------------------

_FILES = {"movietweetings": "movietweetings_142k/ratings.dat*",
          "online-retail": "online_retail/online_retail.csv*"}


def _files(name: str) -> list[str]:
    return data_files(_FILES[name])


def _recipe(case: DriftCase, work: Path) -> tuple[Recipe, list[str]]:
    if case.name == "synthetic":
        log = SyntheticLog(case.num_rows, 7, (300, 1_000, 3_000, 10_000, 30_000) * 5 + (300,),
                           effect=2.5, drift=0.3)
        return load_recipe("criteo-kaggle"), [str(write_synthetic_log(work / "log.txt", log))]
    if case.name == "movietweetings":
        return load_recipe("movietweetings"), _files(case.name)
    return generic_recipe("csv", Choice(
        ["StockCode", "CustomerID:integral", "Country"], "Quantity", time="InvoiceDate",
        time_format="iso", threshold=_BULK)), _files(case.name)


def _read(case: DriftCase, work: Path) -> _Log:
    recipe, files = _recipe(case, work)
    preprocess(recipe, files, work / "out", PreprocessOptions(raw_ids=True, valid="0", test="0"))
    folder = Folder.open(work / "out", allow_raw=True)
    batches = list(Loader(work / "out", "train", LoaderOptions(
        case.batch_size, window=0, prefetch=0)))
    when = folder.time or folder.bucket
    days = folder.read_columns((when,), ("train",))[when].astype(np.int64)
    return _Log(folder.sparse, len(folder.dense), batches, days // _DAY_S if folder.time else days,
                np.concatenate([b.labels.numpy() for b in batches]),
                analyze_folder(work / "out"))


# ---- contenders ----------------------------------------------------------------------------------


def _hottest(keys: np.ndarray, most: int) -> np.ndarray:
    """The `most` most frequent distinct keys, ascending."""
    found, counts = np.unique(keys, return_counts=True)
    return np.sort(found[np.argsort(-counts, kind="stable")[:most]])


def _number(known: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Rows of keys: 1 + the index in `known`, or 0 for unknown keys."""
    at = np.minimum(np.searchsorted(known, keys), known.size - 1)
    return np.where(known[at] == keys, at + 1, 0)


def _mapped(log: _Log, maps: Sequence[Map]) -> Iterator[Any]:
    """The log's batches with keys replaced by rows."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    for batch in log.batches:
        kjt = batch.sparse_features
        values = np.concatenate([of(kjt[name].values().numpy()) for name, of in zip(
            log.columns, maps, strict=True)])
        yield type(batch)(batch.dense_features, KeyedJaggedTensor(
            list(log.columns), torch.from_numpy(values.astype(np.int64)), lengths=kjt.lengths()),
            batch.labels)


class _Scorer(nn.Module):
    """An MLP over pooled embeddings and dense features; returns logits [B]."""

    def __init__(self, columns: Sequence[str], num_rows: Sequence[int], dim: int, num_dense: int
                 ) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        super().__init__()
        self.over = nn.Sequential(nn.Linear(len(columns) * dim + num_dense, 32), nn.ReLU(),
                                  nn.Linear(32, 1))
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(
            name=f"t{k}", embedding_dim=dim, num_embeddings=n, feature_names=[name])
            for k, (name, n) in enumerate(zip(columns, num_rows, strict=True))])

    def forward(self, batch: Any) -> torch.Tensor:
        rows = self.tables(batch.sparse_features).values()
        logits: torch.Tensor = self.over(torch.cat([batch.dense_features, rows], 1))[:, 0]
        return logits


def _score(case: DriftCase, log: _Log, batches: Sequence[Any], num_rows: Sequence[int], seed: int,
           rule: oper.DynamicTable | None) -> tuple[np.ndarray, list[float]]:
    """Train on all batches; returns each sample's logit before its training step, float32 [N], and
    for dynamic tables the share of lookups that read the default row, by column."""
    torch.manual_seed(seed)
    model: Any = _Scorer(log.columns, num_rows, case.dim, log.num_dense)
    given: dict[str, Any] = {}
    if rule is not None:
        given = {"dynamic": replace(rule, seed=seed), "stats": AccessStats(
            log.stats.num_samples, {f"t{k}": log.stats.tables[n]
                                    for k, n in enumerate(log.columns)})}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no access statistics.*")
        model = oper.shard(model, optimizer=oper.RowWiseAdagrad(lr=0.05),
                           batch_size=case.batch_size, **given)
    dense = torch.optim.Adagrad(model.over.parameters(), lr=0.02)
    found = []
    for batch in batches:
        dense.zero_grad()
        logits = model(batch)
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        dense.step()
        found.append(logits.detach().clone())
    tables = model.tables.tables
    counts = [tables.keys.counts(f"t{k}").default_share for k in range(len(log.columns))
              ] if rule is not None else []
    tables.close()
    return torch.cat(found).numpy(), counts


def _by_day(scores: np.ndarray, log: _Log) -> np.ndarray:
    """AUC of each day after the first, without days of a single label, float64 [D]."""
    cuts = np.flatnonzero(np.diff(log.days)) + 1
    pairs = list(zip(np.split(scores, cuts), np.split(log.labels, cuts), strict=True))[1:]
    found = np.array([auc(s, y) for s, y in pairs])
    return found[np.isfinite(found)]
