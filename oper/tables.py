"""Descriptions of embedding tables as plain, validated data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from oper.errors import InvalidInputError, require_fields
from oper.ranges import Positive, Rule, one_of, rules_of

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bits per code of read-only, quantised rows, in the layout of FBGEMM's IntNBit tables: a float16
# scale, a float16 bias, then the codes.
CODE_BITS = {"int8": 8, "int4": 4}
SCALE_BIAS_BYTES = 4
DTYPES = (*DTYPE_BYTES, *CODE_BITS)
POOLINGS = ("sum", "mean", "none")
KEY_BUCKET_ROWS = 64  # rows per hash bucket of a dynamic table; a key's row lies in its bucket
#: Which key of a dynamic table loses its row to a new key, see `oper.DynamicTable`.
KEY_EVICTIONS = ("lru", "lfu", "distance_lfu")


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """The state layout of an optimizer and the properties of its update rule.

    Attributes:
        code: the optimizer's number in csrc/common/optimizer.h.
        state: (name, is_per_row) of each float32 state array, which has one number per row if
            is_per_row, else one per row and column.
        needs_whole_rows: the update uses norms over all columns of a row, so its tables cannot be
            split by columns.
        counts_steps: the update depends on the number of earlier steps (bias correction).
        is_proportional: the step is proportional to the gradient. The steps of other optimizers
            hardly depend on its size.
        squares: name of the state array with sums or averages of squared gradients; empty = none.
    """

    code: int
    state: tuple[tuple[str, bool], ...] = ()
    needs_whole_rows: bool = False
    counts_steps: bool = False
    is_proportional: bool = False
    squares: str = ""

    @property
    def is_row_wise(self) -> bool:
        """Whether the state has one number per row, computed from squared gradients of all columns.

        Ranks that own column pieces of the same row then exchange their sums of squares.
        """
        return any(per_row for _, per_row in self.state)

    def state_bytes(self, dim: int) -> int:
        """Bytes of the state of one row of `dim` columns."""
        return sum(4 if per_row else 4 * dim for _, per_row in self.state)


_VECTOR, _SECOND_VECTOR = ("momentum1", False), ("momentum2", False)
#: The optimizers of tables, by `TableSpec.optimizer`.
OPTIMIZERS: dict[str, OptimizerKind] = {
    "none": OptimizerKind(0),
    "sgd": OptimizerKind(1, is_proportional=True),
    "rowwise_adagrad": OptimizerKind(2, (("momentum1", True),), squares="momentum1"),
    "adagrad": OptimizerKind(3, (_VECTOR,), squares="momentum1"),
    "adam": OptimizerKind(4, (_VECTOR, _SECOND_VECTOR), counts_steps=True, squares="momentum2"),
    "partial_rowwise_adam": OptimizerKind(
        5, (_VECTOR, ("momentum2", True)), counts_steps=True, squares="momentum2"),
    "momentum_sgd": OptimizerKind(6, (_VECTOR,), is_proportional=True),
    "lars_sgd": OptimizerKind(7, (_VECTOR,), needs_whole_rows=True),
    "lamb": OptimizerKind(8, (_VECTOR, _SECOND_VECTOR), needs_whole_rows=True, counts_steps=True,
                          squares="momentum2"),
    "partial_rowwise_lamb": OptimizerKind(
        9, (_VECTOR, ("momentum2", True)), needs_whole_rows=True, counts_steps=True,
        squares="momentum2"),
}


def bytes_of_row(dtype: str, dim: int) -> int:
    """Bytes of `dim` columns of one row stored as `dtype`."""
    if dtype in CODE_BITS:
        return SCALE_BIAS_BYTES + -(-dim * CODE_BITS[dtype] // 8)
    return dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One embedding table.

    Attributes:
        name: the table's name, unique within a collection.
        num_rows: number of rows (TorchRec's ``num_embeddings``).
        dim: number of columns (TorchRec's ``embedding_dim``).
        features: names of the features that look up in this table, in order.
        pooling: ``"sum"``, ``"mean"`` or ``"none"`` (unpooled sequences).
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``; ``"int8"`` or ``"int4"`` (even dims)
            for tables that are only read, which need ``optimizer="none"``.
        optimizer: a key of `OPTIMIZERS`; determines the size of the optimizer state.

    Raises:
        InvalidInputError: a field has an invalid value.
    """

    name: Annotated[str, Rule(lambda x: isinstance(x, str) and x != "", "a non-empty name")]
    num_rows: Positive
    dim: Positive
    features: tuple[str, ...] = ()
    pooling: Annotated[str, one_of(*POOLINGS)] = "sum"
    dtype: Annotated[str, one_of(*DTYPES)] = "float32"
    optimizer: Annotated[str, one_of(*OPTIMIZERS)] = "rowwise_adagrad"

    def __post_init__(self) -> None:
        features: object = self.features  # may be of any type: a caller's or a file's value
        require_fields(
            self, f"invalid table {self.name!r}", "correct this field of the table",
            *rules_of(self), ("features", isinstance(features, tuple | list)
                              and all(isinstance(f, str) for f in features), "a sequence of names"))
        if self.dtype in CODE_BITS and self.optimizer != "none":
            raise InvalidInputError(f"invalid table {self.name!r}", "optimizer", self.optimizer,
                                    f"'none' for rows of {self.dtype}",
                                    "train in a float type and quantise for inference")
        if self.dtype == "int4" and self.dim % 2:
            raise InvalidInputError(f"invalid table {self.name!r}", "dim", self.dim,
                                    "an even number for int4 rows", "use int8")
        object.__setattr__(self, "features", tuple(self.features))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's weights."""
        return bytes_of_row(self.dtype, self.dim)

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's optimizer state."""
        return OPTIMIZERS[self.optimizer].state_bytes(self.dim)

    @property
    def may_be_split(self) -> bool:
        """Whether the table may be split by columns."""
        return not OPTIMIZERS[self.optimizer].needs_whole_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows with their optimizer state."""
        return self.bytes_for(trains=True)

    def bytes_for(self, trains: bool) -> int:
        """Bytes of all rows, with their optimizer state if the table is trained."""
        return self.num_rows * (self.row_bytes + self.state_bytes * trains)

    def to_json(self) -> dict[str, Any]:
        """The table as JSON-serializable values."""
        return {**asdict(self), "features": list(self.features)}

    @staticmethod
    def from_json(value: dict[str, Any]) -> TableSpec:
        """Parse the output of `to_json`; raises InvalidInputError for bad fields or values."""
        try:
            return TableSpec(**value)
        except TypeError as error:
            raise InvalidInputError("cannot read a table", "fields", value, "TableSpec's fields",
                                    f"correct them ({error})") from None


def check_unique(tables: Iterable[TableSpec]) -> tuple[TableSpec, ...]:
    """`tables` as a tuple; raises InvalidInputError if two share a name or there are none."""
    result = tuple(tables)
    for table in result:
        if not isinstance(table, TableSpec):
            raise InvalidInputError("invalid tables", "table", table, "an oper.TableSpec",
                                    "pass oper.TableSpec(name, num_rows, dim)")
    names = [t.name for t in result]
    if not names:
        raise InvalidInputError("no tables", "tables", [], "at least one table", "add a table")
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InvalidInputError("two tables share a name", "names", twice, "unique names",
                                "rename one of the tables")
    return result


def plan_names(owned: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the names by which statistics and plans identify a model's tables.

    Args:
        owned: (path of the module, name of the table within it), for every table of the model.

    Returns:
        For each pair, the table's name, or ``"path.name"`` if several tables have the same name.
    """
    pairs = list(owned)
    count = Counter(name for _, name in pairs)
    return {(path, name): name if count[name] == 1 else f"{path}.{name}" for path, name in pairs}


def format_bytes(num_bytes: float) -> str:
    """Format a size as text such as ``"1.43 GB"``; units are powers of ten."""
    if not math.isfinite(num_bytes):
        return f"{num_bytes} B"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"
