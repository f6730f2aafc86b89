"""The device back end of these tests: a GPU, or csrc/device compiled against emulation.h."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from oper.plan import Plan
from oper.shmem import library
from oper.shmem.batch import Lookup
from oper.shmem.memory.device_heap import DeviceHeap
from oper.shmem.optim.optimizers import Optimizer
from oper.shmem.passes import Backward
from oper.tables import TableSpec
from tests import runtime_support
from tests.cuda.compiler import emulated_library
from tests.runtime_support import Case, Result, make_steps, train_virtual

_load_device: Callable[[], Any] = library.load_device


@functools.cache
def has_gpu() -> bool:
    """Whether the tests run on a real device instead."""
    return torch.cuda.is_available()


@functools.cache
def load() -> Any:
    """Stands in for `oper.shmem.library.load_device`."""
    if has_gpu():
        return _load_device()
    library.load()
    torch.ops.load_library(str(emulated_library()))
    DeviceHeap._allocate = lambda self: (  # type: ignore[method-assign]
        torch.ops.oper_emulated.memory(self._whole.rank, True, self._size))
    return torch.ops.oper_emulated


def replace_library() -> None:
    """Make this process use the emulated library until it exits."""
    library.load_device = load


def emulate(patches: pytest.MonkeyPatch) -> None:
    """Use the emulated device library, and build it before ranks wait for each other."""
    load()
    patches.setattr(library, "load_device", load)
    patches.setenv("OPER_SEND_BUFFER_BYTES", str(4 << 20))


class _HostLookup(torch.autograd.Function):
    """A lookup whose backward pass runs on the caller's thread, since its tensors are on the CPU.

    Autograd has one thread per device, in which virtual ranks could not wait for each other.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None, tables: Any,
                batch: Lookup) -> torch.Tensor:
        out, offsets = tables.forward(batch, collective=True)
        ctx.call = (tables, batch, offsets)
        ctx.device_of_weights = None if weights is None else weights.device
        return out.cpu()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor
                 ) -> tuple[None, torch.Tensor | None, None, None]:
        tables, batch, offsets = ctx.call
        gradient = grads[0].to(tables.device)
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = tables.weight_gradient(gradient, batch, offsets, False).to(
                ctx.device_of_weights)
        tables.apply_all([Backward((gradient,), batch, offsets)])
        return None, of_weights, None, None


def moved(batch: Lookup, to: torch.device) -> Lookup:
    """The batch with its tensors on a device."""
    return replace(batch, ids=batch.ids.to(to), lengths=batch.lengths.to(to),
                   weights=None if batch.weights is None else batch.weights.to(to))


class FromHost:
    """Tables on a GPU that copy batches from host memory and results back, as tests expect."""

    def __init__(self, tables: Any) -> None:
        self._tables = tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables, name)

    def lookup(self, batch: Lookup) -> torch.Tensor:
        there = moved(batch, self._tables.device)
        if self._tables.optimizers is None or not torch.is_grad_enabled():
            plain: torch.Tensor = self._tables.lookup(there)
            return plain.cpu()
        if self._tables.keys is not None:
            there = self._tables.keys.translate(there)
        out: torch.Tensor = _HostLookup.apply(  # type: ignore[no-untyped-call]
            self._tables.anchor.detach().cpu().requires_grad_(), batch.weights, self._tables, there)
        return out

    def resolve(self, batch: Lookup) -> Lookup:
        found: Lookup = self._tables.resolve(moved(batch, self._tables.device))
        return found

    def replica_view(self, *args: Any) -> torch.Tensor:
        found: torch.Tensor = self._tables.replica_view(*args)
        return found.cpu()


def device_tables(*args: Any, **kwargs: Any) -> Any:
    """Stands in for `ShardedTables`."""
    from oper.shmem.device.tables import DeviceTables

    if not has_gpu():
        return DeviceTables(*args, device="cpu", **kwargs)
    return FromHost(DeviceTables(*args, device="cuda", **kwargs))


@contextmanager
def on_devices(patches: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, `open_tables` and its callers open tables of the device back end."""
    with patches.context() as patch:
        patch.setattr(runtime_support, "ShardedTables", device_tables)
        yield


def small_case(optimizer: str, **fields: Any) -> Case:
    """Rows of whole 16-byte parts and others, a shared key, a mean."""
    shapes = [("odd", 9, 6, ("f1",), "sum"), ("two", 300, 12, ("a", "b"), "sum"),
              ("mean", 2000, 24, ("b",), "mean")]
    tables = tuple(TableSpec(n, r, d, f, p, "float32", optimizer) for n, r, d, f, p in shapes)
    return Case(tables, ("b", "f1", "extra", "a"), **{"base_batch": 8, **fields})


def both(patches: pytest.MonkeyPatch, case: Case, plan: Plan, optimizer: Optimizer,
         steps: int = 3, domains: tuple[int, ...] | None = None) -> tuple[Result, Result]:
    """Run one training on the host back end in one memory domain, and on the device back end."""
    batches = make_steps(case, plan.world_size, steps)
    host = train_virtual(case, plan, batches, optimizer)
    with on_devices(patches):
        return host, train_virtual(case, plan, batches, optimizer, domains=domains)
