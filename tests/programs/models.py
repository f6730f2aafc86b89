"""Models of the programs: drawn at random as plain data, built, and called with drawn batches.

A model is a dict that prints as a Python literal, so that the text of a failing program is enough
to run it again. Sharded and unsharded models are built from the same data and have equal weights.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

Spec = dict[str, Any]
NAMES = ("first", "second")  # children of a Net
LISTS = {"ebc": "embedding_bags", "ec": "embeddings"}  # in which collections have their tables
# Shapes of batches; `usual` has a few bags, some of them empty.
SHAPES = ("usual", "usual", "usual", "empty_bags", "empty_batch", "one", "repeats", "same", "int32",
          "strided", "two_d", "other_keys", "variable")


# ---- drawing -------------------------------------------------------------------------------------


def draw_model(rng: np.random.Generator) -> Spec:
    """Draw a model, as data."""
    container = str(rng.choice(["bare", "sequential", "named", "named", "named"]))
    embs = [draw_embedding(rng) for _ in range(1 + (container == "named" and rng.random() < 0.35))]
    if len(embs) > 1:  # sharding leaves a subclass with its own forward pass, with a warning
        for emb in embs:
            emb.update({"subclass": ""} if emb.get("subclass") == "scaled" else {})
    dense = container == "named" and rng.random() < 0.7
    return {"container": container, "embs": embs,
            "dense": str(rng.choice(["after", "before"])) if dense else "",
            "seed": int(rng.integers(0, 1 << 20))}


def draw_embedding(rng: np.random.Generator) -> Spec:
    """Draw a module with tables, as data."""
    kind = str(rng.choice(["bag", "bag", "embedding", "ebc", "ebc", "ec"]))
    half = bool(rng.random() < 0.12)
    if kind in ("bag", "embedding"):
        rows = int(rng.integers(3, 41))
        emb: Spec = {"kind": kind, "rows": rows, "dim": int(rng.integers(1, 10)), "half": half,
                     "padding": int(rng.integers(0, rows)) if rng.random() < 0.4 else None}
        if kind == "bag":
            emb["mode"] = str(rng.choice(["sum", "mean"]))
            emb["last"] = bool(rng.random() < 0.3)
            emb["weighted"] = emb["mode"] == "sum" and bool(rng.random() < 0.4)
        return emb
    dim = int(rng.integers(1, 10))
    weighted = kind == "ebc" and bool(rng.random() < 0.3)
    tables = []
    for _ in range(int(rng.integers(1, 4))):
        features = rng.permutation(["f0", "f1", "f2"])[: int(rng.integers(1, 3))].tolist()
        tables.append({
            "rows": int(rng.integers(3, 41)), "features": features,
            "dim": dim if kind == "ec" else int(rng.integers(1, 10)),
            "mode": "sum" if weighted or rng.random() < 0.6 else "mean"})
    emb = {"kind": kind, "tables": tables, "half": half}
    if kind == "ebc":
        emb["weighted"] = weighted
        emb["subclass"] = str(rng.choice(["", "plain", "scaled"], p=[0.91, 0.06, 0.03]))
    else:
        emb["need_indices"] = bool(rng.random() < 0.3)
    return emb


# ---- building ------------------------------------------------------------------------------------


class OwnCollection(EmbeddingBagCollection):
    """A user's subclass that adds nothing."""


class ScaledCollection(EmbeddingBagCollection):
    """A user's subclass that overrides the forward pass."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        out = super().forward(features)
        return KeyedTensor(out.keys(), out.length_per_key(), out.values() * 0.5)


_COLLECTIONS = {"": EmbeddingBagCollection, "plain": OwnCollection, "scaled": ScaledCollection}


class Net(nn.Module):
    """One or two modules with tables, and perhaps a dense layer on the first of their outputs."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        width = _first_width(spec["embs"][0])
        if spec["dense"] == "before":  # only the order of the children differs
            self.dense = nn.Linear(width, 2)
        for name, emb in zip(NAMES, spec["embs"], strict=False):
            setattr(self, name, build_embedding(emb))
        if spec["dense"] == "after":
            self.dense = nn.Linear(width, 2)

    def forward(self, inputs: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
        """Return all outputs as tensors, that of the dense layer first."""
        return self.with_dense(getattr(self, name)(*args)
                               for name, args in zip(NAMES, inputs, strict=False))

    def with_dense(self, results: Iterable[Any]) -> list[torch.Tensor]:
        """Return the outputs of the modules with tables as tensors, that of the dense layer first.
        """
        outs = [x for result in results for x in tensors_of(result)]
        if hasattr(self, "dense"):
            outs.insert(0, self.dense(outs[0].to(self.dense.weight.dtype)))
        return outs


def _first_width(emb: Spec) -> int:
    if "tables" not in emb:
        return int(emb["dim"])
    if emb["kind"] == "ec":
        return int(emb["tables"][0]["dim"])
    return sum(t["dim"] * len(t["features"]) for t in emb["tables"])


def build(spec: Spec) -> nn.Module:
    """Build the unsharded model, whose weights depend only on its seed."""
    if spec["container"] == "named":
        model: nn.Module = Net(spec)
    else:
        model = build_embedding(spec["embs"][0])
        if spec["container"] == "sequential":
            model = nn.Sequential(model)
    rng = torch.Generator().manual_seed(spec["seed"])
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=rng) * 0.5)
    return model


def build_embedding(emb: Spec) -> nn.Module:
    dtype = torch.float16 if emb["half"] else torch.float32
    if emb["kind"] == "bag":
        return nn.EmbeddingBag(emb["rows"], emb["dim"], mode=emb["mode"], dtype=dtype,
                               padding_idx=emb["padding"], include_last_offset=emb["last"])
    if emb["kind"] == "embedding":
        return nn.Embedding(emb["rows"], emb["dim"], padding_idx=emb["padding"], dtype=dtype)
    common = [{"num_embeddings": t["rows"], "embedding_dim": t["dim"], "name": f"t{k}",
               "feature_names": list(t["features"]),
               "data_type": DataType.FP16 if emb["half"] else DataType.FP32}
              for k, t in enumerate(emb["tables"])]
    device = torch.device("cpu")
    if emb["kind"] == "ec":
        return EmbeddingCollection(tables=[EmbeddingConfig(**c) for c in common], device=device,
                                   need_indices=emb["need_indices"])
    pooling = [PoolingType.MEAN if t["mode"] == "mean" else PoolingType.SUM for t in emb["tables"]]
    return _COLLECTIONS[emb["subclass"]](
        tables=[EmbeddingBagConfig(**c, pooling=p) for c, p in zip(common, pooling, strict=True)],
        is_weighted=emb["weighted"], device=device)


@dataclass(frozen=True)
class Table:
    """A table's place: the path of its module in the model, its own name, and its state_dict key.
    """

    path: str
    own: str
    key: str
    rows: int
    dim: int
    half: bool
    kind: str


def tables_of(spec: Spec) -> list[Table]:
    """List all tables of a model."""
    found = []
    for name, emb in zip(NAMES, spec["embs"], strict=False):
        path = {"bare": "", "sequential": "0", "named": name}[spec["container"]]
        dot = f"{path}." if path else ""
        kind = emb["kind"]
        if kind in ("bag", "embedding"):
            found.append(Table(path, "weight", f"{dot}weight", emb["rows"], emb["dim"],
                               emb["half"], kind))
            continue
        found += [Table(path, f"t{k}", f"{dot}{LISTS[kind]}.t{k}.weight", t["rows"], t["dim"],
                        emb["half"], kind) for k, t in enumerate(emb["tables"])]
    return found


def tensors_of(result: Any) -> list[torch.Tensor]:
    """List the tensors of a module's output."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list):
        return result
    if isinstance(result, dict):
        return [jt.values() for jt in result.values()]
    return [result.values()]


def whole(value: Any) -> Any:
    """Copy a value of a state as a plain tensor; other values than tensors are returned unchanged.
    """
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def names_of(result: Any) -> Any:
    """Return the data of an output other than its values: keys, lengths and ids."""
    if isinstance(result, KeyedTensor):
        return result.keys(), result.length_per_key()
    if isinstance(result, dict):
        return [(k, jt.lengths().tolist(), None if jt.weights_or_none() is None
                 else jt.weights().tolist()) for k, jt in result.items()]
    return None


# ---- batches -------------------------------------------------------------------------------------


class Batch:
    """One rank's input of one step: the arguments of every module with tables.

    Attributes:
        inputs: arguments, one tuple per module.
        ids, lengths, weights: the tensors in them that can be changed in place, by module;
            `lengths` are offsets where the module takes offsets.
        rows: of the smallest table that each module's ids go to.
    """

    def __init__(self, spec: Spec, seed: int, shape: str) -> None:
        self.spec, self.seed = spec, seed
        self.inputs: list[tuple[Any, ...]] = []
        self.ids: list[torch.Tensor] = []
        self.lengths: list[torch.Tensor | None] = []
        self.weights: list[torch.Tensor | None] = []
        self.rows: list[int] = []
        rng = np.random.default_rng(seed)
        size = {"empty_batch": 0, "one": 1}.get(shape, int(rng.integers(1, 7)))
        for emb in spec["embs"]:
            one_tensor = spec["container"] == "sequential"
            if emb["kind"] in ("bag", "embedding"):
                self._torch_input(emb, rng, size, "two_d" if one_tensor and shape != "empty_batch"
                                  else shape, one_tensor)
            else:
                self._jagged_input(emb, rng, size, shape)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the model's forward pass."""
        return (self.inputs,) if self.spec["container"] == "named" else self.inputs[0]

    def coefficients(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """Return the coefficients of an output in the loss, in its dtype and shape."""
        rng = torch.Generator().manual_seed(self.seed * 31 + index)
        return torch.randn(out.shape, generator=rng).to(out.dtype)

    def _ids(self, rng: np.random.Generator, rows: int, count: int, shape: str) -> torch.Tensor:
        ids = rng.integers(0, rows, count)
        if shape == "repeats":
            ids = ids[:2][rng.integers(0, min(2, count), count)] if count else ids
        elif shape == "same":
            ids[:] = rng.integers(0, rows)
        out = torch.from_numpy(ids)
        if shape == "int32":
            out = out.int()
        elif shape == "strided":
            out = torch.stack([out, out], 1)[:, 0]
        return out

    def _lengths(self, rng: np.random.Generator, size: int, shape: str) -> np.ndarray:
        if shape == "empty_bags":
            return np.zeros(size, np.int64)
        return rng.integers(0, 9 if shape == "repeats" else 4, size)

    def _note(self, rows: int, ids: torch.Tensor, lengths: torch.Tensor | None,
              weights: torch.Tensor | None, args: tuple[Any, ...]) -> None:
        self.rows.append(rows)
        self.ids.append(ids)
        self.lengths.append(lengths)
        self.weights.append(weights)
        self.inputs.append(args)

    def _torch_input(self, emb: Spec, rng: np.random.Generator, size: int, shape: str,
                     alone: bool) -> None:
        rows = emb["rows"]
        if emb["kind"] == "embedding":
            width = int(rng.integers(1, 4))
            ids = self._ids(rng, rows, size * width, shape)
            if shape in ("two_d", "int32"):
                ids = ids.view(size, width)
            return self._note(rows, ids, None, None, (ids,))
        if shape == "two_d" or alone:
            width = int(rng.integers(1, 4))
            ids = self._ids(rng, rows, size * width, shape).reshape(size, width)
            weights = None if alone else self._weights(emb, rng, ids)
            return self._note(rows, ids, None, weights,
                              (ids,) if alone else (ids, None, weights))
        lengths = self._lengths(rng, size, shape)
        ids = self._ids(rng, rows, int(lengths.sum()), shape)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        offsets = torch.from_numpy(ends if emb["last"] else ends[:-1]).to(ids.dtype)
        weights = self._weights(emb, rng, ids)
        return self._note(rows, ids, offsets, weights, (ids, offsets, weights))

    def _weights(self, emb: Spec, rng: np.random.Generator, ids: torch.Tensor
                 ) -> torch.Tensor | None:
        if not emb.get("weighted"):
            return None
        values = torch.from_numpy(rng.uniform(0.5, 1.5, tuple(ids.shape)))
        return values.half() if emb["half"] else values.float()

    def _jagged_input(self, emb: Spec, rng: np.random.Generator, size: int, shape: str) -> None:
        used = list(dict.fromkeys(f for t in emb["tables"] for f in t["features"]))
        keys = rng.permutation([*used, "extra"]).tolist() if shape == "other_keys" else used
        rows = {k: min((t["rows"] for t in emb["tables"] if k in t["features"]), default=5)
                for k in keys}
        if emb["half"] and shape == "variable":  # torch adds up gradients of shared bags in fp16
            shape = "usual"
        strides = [int(rng.integers(1, size + 1)) if shape == "variable" else size for _ in keys]
        lengths = [self._lengths(rng, stride, shape) for stride in strides]
        ids = torch.cat([self._ids(rng, rows[k], int(n.sum()), shape)
                         for k, n in zip(keys, lengths, strict=True)])
        if shape == "strided":
            ids = torch.stack([ids, ids], 1)[:, 0]
        weights = self._weights(emb, rng, ids)
        counts = torch.from_numpy(np.concatenate(lengths)).to(ids.dtype)
        layout: dict[str, Any] = {"stride": size}
        if shape == "variable":
            layout = {"stride_per_key_per_rank": [[stride] for stride in strides]}
            if emb["kind"] == "ebc":
                inverse = np.stack([rng.integers(0, stride, size) for stride in strides])
                layout["inverse_indices"] = (keys, torch.from_numpy(inverse))
        features = KeyedJaggedTensor(keys, ids, weights, lengths=counts, **layout)
        self._note(min(rows.values()), ids, counts, weights, (features,))


def call_unsharded(model: Any, spec: Spec, batch: Batch) -> Any:
    """Return the output of a model; TorchRec cannot split batches without samples, which are
    replaced by empty outputs."""
    features = [args[0] for args in batch.inputs]
    if not any(isinstance(f, KeyedJaggedTensor) and f.stride() == 0 for f in features):
        return model(*batch.arguments)
    if spec["container"] != "named":
        return _empty(model[0] if spec["container"] == "sequential" else model, spec["embs"][0],
                      batch.inputs[0])
    return model.with_dense(_empty(getattr(model, name), emb, args) for name, emb, args in zip(
        NAMES, spec["embs"], batch.inputs, strict=False))


def _empty(module: Any, emb: Spec, args: tuple[Any, ...]) -> Any:
    """Return the output for a batch without samples."""
    if emb["kind"] in ("bag", "embedding"):
        return module(*args)
    none, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    named = [(f, k) for k, t in enumerate(emb["tables"]) for f in t["features"]]
    configs = (module.embedding_configs() if emb["kind"] == "ec"
               else module.embedding_bag_configs())
    names = [n for group in get_embedding_names_by_table(configs) for n in group]
    if emb["kind"] == "ec":
        need = module.need_indices()
        return {name: JaggedTensor(module.embeddings[f"t{k}"](none).float(), lengths=none,
                                   weights=none if need else None)
                for name, (_, k) in zip(names, named, strict=True)}
    weights = args[0].weights() if emb.get("weighted") else None
    parts = []
    for _, k in named:
        bag = module.embedding_bags[f"t{k}"]
        parts.append(bag(none, offsets, None if weights is None else weights.to(bag.weight.dtype)))
    scale = 0.5 if emb["subclass"] == "scaled" else 1.0
    return KeyedTensor(names, [p.shape[1] for p in parts], torch.cat(parts, 1).float() * scale)
