"""Protocols (typing) by which the components of `ShardedTables` access it without importing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from oper.plan import Plan
from oper.rows.directory import TableDirectory
from oper.rows.traffic import Traffic
from oper.shmem.batch import Lookup
from oper.shmem.group.groups import Group
from oper.shmem.group.turns import Turns
from oper.shmem.optim.optimizers import Optimizer
from oper.shmem.passes import Backward
from oper.tables import TableSpec


class Collection(Protocol):
    """The interface of `ShardedTables` that fault attribution (`group.desync`) uses."""

    name: str
    specs: dict[str, TableSpec]
    group: Group
    handle: int
    collection: int
    phase: int
    is_watched: bool

    @property
    def is_one_domain(self) -> bool: ...
    @property
    def members(self) -> Sequence[int]: ...


class Tables(Collection, Protocol):
    """The interface of `ShardedTables` that lookups, migrations and measurements use."""

    device: torch.device
    plan: Plan
    features: list[tuple[str, str]]
    directories: list[TableDirectory]
    optimizers: Mapping[str, Optimizer] | None
    number: int
    output_columns: int
    keys: Any  # `Keys`, or None
    replicas: Any  # `Synchronizer`, or None
    turns: Turns
    anchor: torch.Tensor
    collected: Any  # `CollectedPasses`
    frozen: frozenset[str]
    num_steps: int
    num_flushes: int
    lookups_at_once: bool
    held: Any  # `HeldPasses`
    migration: Any  # `Migration`, or None
    pull: Any
    trains_in_parts: bool
    bounds: Any  # `BoundsCheck`

    @property
    def page_kind(self) -> str: ...
    @property
    def domains(self) -> list[list[int]]: ...
    def is_trained(self) -> bool: ...
    def forward(self, batch: Lookup, collective: bool = False
                ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward_alone(self, batch: Lookup) -> tuple[torch.Tensor, torch.Tensor]: ...
    def apply_all(self, parts: list[Backward]) -> None: ...
    def weight_gradient(self, grad: torch.Tensor, batch: Lookup, offsets: torch.Tensor,
                        updates: bool) -> torch.Tensor: ...
    def step(self, passed: Backward, updates: bool = True) -> None: ...
    def refuse(self) -> None: ...
    def barrier(self) -> None: ...
    def send(self, messages: Mapping[int, torch.Tensor],
             read: Callable[[torch.Tensor], Any], phase: int) -> list[Any]: ...
    def all_gather(self, value: Any) -> list[Any]: ...
    def traffic(self, reset: bool = False) -> Traffic: ...
    def view(self, part: str, piece: int, rank: int) -> torch.Tensor: ...
    def replica_view(self, piece: int, rank: int) -> torch.Tensor: ...
    def columns(self, part: str, piece: int) -> slice: ...
    def pieces_of(self, table: str, part: str) -> list[int]: ...
    def gather_piece(self, piece: int, ids: np.ndarray, part: str, columns: slice,
                     out: torch.Tensor) -> None: ...
    def copy_local_replicas(self, piece: int, ids: np.ndarray, columns: slice, out: torch.Tensor
                           ) -> np.ndarray: ...
    def in_rounds(self, work: Sequence[Any], body: Callable[[Any], None]) -> None: ...
    def flush_replicas(self) -> None: ...
    def like(self, plan: Plan) -> Tables: ...
    def check_memory(self) -> None: ...
    def continue_from(self, other: Any, memo: dict[int, Any]) -> None: ...
    def take_over(self, other: Any) -> None: ...
    def use_huge_pages(self) -> str: ...
    def close(self) -> None: ...
