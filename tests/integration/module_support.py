"""Small modules with tables, unsharded and sharded, for tests of module operations."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torchrec
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as KJT

import oper

LR = 0.5


def bag(rows: int = 10, dim: int = 4, **fields: Any) -> nn.EmbeddingBag:
    torch.manual_seed(3)
    return nn.EmbeddingBag(rows, dim, **{"mode": "sum"} | fields)


def shard(module: nn.Module, **fields: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without statistics.*")
        warnings.filterwarnings("ignore", message=".*table sizes.*")
        return oper.shard(module, **{"optimizer": oper.SGD(lr=LR)} | fields)


def collection(names: Sequence[str] = "ab", rows: int = 10, **fields: Any) -> Any:
    torch.manual_seed(5)
    return torchrec.EmbeddingBagCollection(tables=[
        torchrec.EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=4,
                                    feature_names=[f"f_{n}"]) for n in names], **fields)


def kjt(ids: torch.Tensor, keys: tuple[str, ...] = ("f_a", "f_b")) -> KJT:
    return KJT(list(keys), ids, lengths=torch.full((len(keys),), ids.numel() // len(keys)))


def rows(module: nn.Module) -> torch.Tensor:
    return module.get_parameter("weight").detach().clone()
