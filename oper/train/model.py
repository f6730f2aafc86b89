"""Construction of DLRMs for given tables, and their trained state as plain tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from oper.data.loading.loader import ranks as ranks
from oper.errors import FileFormatError, InvalidInputError, needs
from oper.integration.checkpoint.files import load_archive
from oper.support.files import atomic_write
from oper.tables import TableSpec
from oper.train.config import DLRMConfig
from oper.train.names import table_name


def build_dlrm(tables: Sequence[TableSpec], num_dense: int, config: DLRMConfig, seed: int,
               tables_on: str = "cpu") -> nn.Module:
    """Build an unsharded ``DLRMTrain``; equal arguments give equal weights.

    Args:
        tables: the tables; their `dim` must be `config.dim`. `table_name` gives their names in the
            model.
        num_dense: number of dense features.
        config: layer sizes.
        seed: seed of the weights; sets torch's global generator.
        tables_on: device of the tables, ``"cpu"`` or ``"meta"``.

    Returns:
        A module with ``forward(batch) -> (loss, (loss, logits, labels))``, for batches of
        `oper.data.Loader`.

    Raises:
        MissingDependencyError: TorchRec is not installed.
        InvalidInputError: there is not enough memory for the tables.
    """
    with needs("cannot build DLRM", "oper[torchrec]"):
        from torchrec.models.dlrm import DLRMTrain
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection
    torch.manual_seed(seed)
    # Create dense layers first, so that their weights do not depend on `tables_on`.
    configs = [EmbeddingBagConfig(
        name=table_name(t.name), embedding_dim=t.dim, num_embeddings=t.num_rows,
        feature_names=list(t.features)) for t in tables]
    meta = EmbeddingBagCollection(configs, device=torch.device("meta"))
    dlrm = dlrm_over(meta, num_dense, config)
    if tables_on == "cpu":
        try:
            dlrm.sparse_arch.embedding_bag_collection = EmbeddingBagCollection(
                configs, device=torch.device("cpu"))
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            raise InvalidInputError(
                "cannot make the tables", "bytes", sum(4 * t.num_rows * t.dim for t in tables),
                "<= the free memory of this process", 'use fewer rows, or set tables_on = "meta", '
                "so that every rank creates only its shards") from None
    return DLRMTrain(dlrm)


def dlrm_over(collection: Any, num_dense: int, config: DLRMConfig, as_shipped: bool = False) -> Any:
    """Build TorchRec's ``DLRM``, or ``DLRM_DCN``, with weights from torch's global generator.

    Args:
        collection: an ``EmbeddingBagCollection`` on any device with `config.dim` columns.
        num_dense: number of dense features.
        config: layer sizes.
        as_shipped: whether to leave TorchRec's modules as they are instead of applying `copy_less`.
    """
    from torchrec.models.dlrm import DLRM, DLRM_DCN

    from oper.integration.dense.dlrm import copy_less

    layers = (collection, num_dense, [*config.dense_layers, config.dim], [*config.over_layers, 1])
    cpu = torch.device("cpu")
    if config.cross_layers:
        model: Any = DLRM_DCN(*layers, config.cross_layers, config.cross_rank, dense_device=cpu)
    else:
        model = DLRM(*layers, dense_device=cpu)
    return model if as_shipped else copy_less(model)


def describe(tables: Sequence[TableSpec], num_dense: int) -> dict[str, Any]:
    """Return the model's description for ``config.json``, which a server needs to rebuild it."""
    return {"num_dense": num_dense, "tables": [
        {"name": t.name, "num_rows": t.num_rows, "features": list(t.features)} for t in tables]}


def full_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's ``state_dict`` as plain CPU tensors, named as unsharded. Collective.

    On ranks other than 0, the result is empty.
    """
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor

    rank, _ = ranks()
    state: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        elif isinstance(value, ShardedTensor):
            full = torch.empty(value.size(), dtype=value.dtype) if rank == 0 else None
            value.gather(dst=0, out=full)
            value = full
        if rank == 0:
            state[name.removeprefix("module.")] = value.detach().cpu().contiguous()
    return state


def save_state(path: str | os.PathLike[str], state: Mapping[str, torch.Tensor]) -> None:
    """Write a ``state_dict`` atomically by ``torch.save``."""
    with atomic_write(path) as file:
        # Copies, since torch.save writes the entire storage of a view.
        torch.save({name: value.clone() for name, value in state.items()}, file)


def load_state(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read a file of `save_state`; only tensors are unpickled.

    Raises:
        FileFormatError: the file is damaged or was not written by `save_state`.
    """
    what = f"cannot read {os.fspath(path)!r} as a trained state"
    state = load_archive(path, what)
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise FileFormatError(what, "content", type(state).__name__, "tensors by name",
                              "pass a state.pt that oper train wrote")
    return state
