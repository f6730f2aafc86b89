"""Conversion of row-wise optimizer states to and from TorchRec's column-wise sharding.

TorchRec stores a row-wise state, such as that of row-wise Adagrad, for every column shard of a
table: [shards * rows], shard after shard in the order of their columns (``EmbeddingFusedOptimizer``
in ``batched_embedding_kernel.py``). OPER stores one number per row, [rows], like the unsharded
optimizer. Both accumulate the mean of squared gradients, TorchRec over the columns of a shard and
OPER over all columns, so that

    state of the row = sum over shards of (columns of the shard / columns) * state of the shard.

In the other direction, every shard gets the state of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from oper.errors import InvalidInputError
from oper.integration.checkpoint.on_demand import TableRows
from oper.integration.checkpoint.table_state import shard_range


class StateOfPieces:
    """Loads a row-wise state into a value with another number of column shards.

    Args:
        name: name of the state in the checkpoint.
        value: the destination: `TableRows`, a tensor, a ``DTensor`` or TorchRec's
            ``ShardedTensor``.
        stored: the checkpoint's metadata of the stored state.
        metadata: the checkpoint's metadata.

    Attributes:
        buffer: tensor into which the caller loads the stored numbers before calling `finish`.
    """

    def __init__(self, name: str, value: Any, stored: TensorStorageMetadata, metadata: Metadata
                 ) -> None:
        self.value = value
        self.buffer = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.num_left = 0  # read items that `buffer` still lacks
        self._num_rows = min(stored.size[0], value.size()[0])
        self._shares: list[float] = []
        num_pieces = stored.size[0] // self._num_rows
        if num_pieces > 1:
            widths = _widths(name, num_pieces, self._num_rows, metadata)
            self._shares = [w / sum(widths) for w in widths]

    @staticmethod
    def fits(value: Any, stored: TensorStorageMetadata) -> bool:
        """Whether one has a number per row and the other several, one for each column shard."""
        if not hasattr(value, "size"):
            return False
        here, there = tuple(value.size()), tuple(stored.size)
        if len(here) != 1 or len(there) != 1 or here == there or 0 in (*here, *there):
            return False
        pieces = type(value).__name__ == "ShardedTensor" or type(value) is torch.Tensor
        return there[0] % here[0] == 0 or (pieces and here[0] % there[0] == 0)

    def finish(self) -> None:
        """Convert the loaded state and write it to its destination."""
        state = self.buffer
        if self._shares:  # sums in double precision and in the order of columns are reproducible
            pieces = state.double().view(len(self._shares), -1)
            shares = torch.tensor(self._shares, dtype=torch.float64)
            state = (pieces * shares[:, None]).sum(dim=0).to(state.dtype)
        value = self.value
        if isinstance(value, TableRows):
            value.write(state, 0)
        elif type(value).__name__ == "ShardedTensor":
            for shard in value.local_shards():
                first, n = shard.metadata.shard_offsets[0], shard.tensor.shape[0]
                rows = torch.arange(first, first + n) % self._num_rows
                shard.tensor.copy_(state[rows])
        elif hasattr(value, "to_local"):
            mesh = value.device_mesh
            begin, end = shard_range(self._num_rows, mesh.size(), mesh.get_local_rank())
            value.to_local().copy_(state[begin:end])
        else:
            value.copy_(state.repeat(value.shape[0] // state.shape[0]))


def _widths(name: str, num_pieces: int, num_rows: int, metadata: Metadata) -> Sequence[int]:
    """Return the columns of each shard, from the checkpoint's metadata of the table's rows. If the
    checkpoint does not contain the rows, all shards are assumed to be equally wide."""
    parts = name.split(".")
    at = len(parts) - 1 - parts[::-1].index("weight") if "weight" in parts else 0
    for begin in range(at):  # the longest common suffix of the state's and the table's path
        path = ".".join(parts[begin:at + 1])
        for other, rows in metadata.state_dict_metadata.items():
            if (not (other == path or other.endswith(f".{path}"))
                    or not isinstance(rows, TensorStorageMetadata) or len(rows.size) != 2):
                continue
            widths = {c.offsets[1]: c.sizes[1] for c in rows.chunks if c.sizes[1]}
            if rows.size[0] != num_rows or len(widths) not in (1, num_pieces):
                raise InvalidInputError(
                    f"cannot load the optimizer state {name!r}", "rows, numbers per row",
                    (num_rows, num_pieces),
                    f"{rows.size[0]} rows, as in {other!r}, with 1 number each or {len(widths)}, "
                    "one per column shard",
                    "load a checkpoint whose rows and optimizer states were saved together")
            if len(widths) == num_pieces:
                return [widths[column] for column in sorted(widths)]
    return [1] * num_pieces
