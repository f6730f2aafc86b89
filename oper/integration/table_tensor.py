"""A sharded table as a tensor: reading it copies rows out, writing to it in place writes the rows.

The ``weight`` of a sharded module is a `TableParameter`, which ``named_parameters()`` yields. It
has the table's shape and dtype but no storage. An operation on it, or on a view of it, works on a
copy of the affected rows in logical order; in-place changes are written back to the table. Views
(``weight[3]``, ``weight.data``, ``weight.t()``) record the operations that created them, so
writing to a view writes to the table.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from oper.errors import InvalidInputError
from oper.integration.checkpoint.on_demand import TableRows
from oper.integration.checkpoint.table_state import rank0_values
from oper.shmem.tables import ShardedTables

_aten: Any = torch.ops.aten
# One view operation: operator, its arguments after the tensor, keyword arguments, and the index of
# the output (None = the operator has a single output).
_Step = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]


@functools.cache
def _effects(operator: Any) -> tuple[frozenset[str], bool]:
    """Return the names of arguments that an operator writes to, and whether it returns views."""
    schema = operator._schema
    written = frozenset(a.name for a in schema.arguments
                        if a.alias_info is not None and a.alias_info.is_write)
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return written, views


class TableTensor(torch.Tensor):
    """A table or a view of it.

    Reading is one-sided if all ranks are in one memory domain, and otherwise collective. Writing is
    always collective, with the same values on all ranks; if they differ, rank 0's are used.
    """

    # Only `__torch_dispatch__` intercepts operations, after torch has decomposed them.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _rows: TableRows | _KeptRows
    _path: tuple[_Step, ...]
    _shape: torch.Tensor  # on the meta device

    @staticmethod
    def __new__(cls, rows: TableRows | _KeptRows, shape: torch.Tensor, path: tuple[_Step, ...] = (),
                requires_grad: bool = False) -> TableTensor:
        with torch.inference_mode(False):  # inference tensors have no version counter
            new: TableTensor = torch.Tensor._make_wrapper_subclass(
                cls, shape.shape, strides=shape.stride(), storage_offset=shape.storage_offset(),
                dtype=shape.dtype, device=rows.tables.device, requires_grad=requires_grad)
        new._rows, new._shape, new._path = rows, shape, path
        return new

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        written, views = _effects(func)
        if views and not written and isinstance(args[0], TableTensor):
            return args[0]._viewed(func, args[1:], kwargs)
        return _compute(func, args, kwargs, written)

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes = func(self._shape, *args, **kwargs)
        if func is _aten.detach.default or func is _aten.alias.default:
            return self._view(shapes, self._path)
        if isinstance(shapes, torch.Tensor):
            return self._view(shapes, (*self._path, (func, args, kwargs, None)))
        return [self._view(s, (*self._path, (func, args, kwargs, k)))
                for k, s in enumerate(shapes)]

    def _view(self, shape: torch.Tensor, path: tuple[_Step, ...]) -> TableTensor:
        new = TableTensor(self._rows, shape, path)
        if self._rows.views is not None:
            self._rows.views[id(new)] = new
        return new

    def _window(self) -> tuple[int, int]:
        """Return rows `[begin, end)` of the table that contain all elements of this view."""
        num_rows = self._rows.shape[0]
        if not self._path:
            return 0, num_rows
        func, args, kwargs, _ = self._path[0]
        if any(step[0] is _aten.as_strided.default for step in self._path):
            return 0, num_rows  # its offset counts from the table's first row
        if func is _aten.select.int and args[0] == 0 and not kwargs:
            row = args[1] % num_rows
            return row, row + 1
        if func is _aten.slice.Tensor and not kwargs and (not args or args[0] == 0) and (
                len(args) < 4 or args[3] == 1):
            begin, end, _ = slice(*args[1:3]).indices(num_rows)
            return begin, max(begin, end)
        return 0, num_rows

    def _taken_from(self, base: torch.Tensor, first: int) -> torch.Tensor:
        """Return this view, taken from a copy `base` of the table's rows from row `first` on."""
        begin, end = self._window()
        path = self._path
        if (begin, end) != (0, self._rows.shape[0]):
            func, *_ = path[0]
            base = base[begin - first:end - first]
            base, path = base[0] if func is _aten.select.int else base, path[1:]
        for func, args, kwargs, output in path:
            base = func(base, *args, **kwargs)
            base = base if output is None else base[output]
        return base

    # ---- access to values and storage ------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """The table, detached from autograd; assigning to it copies values into the rows."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self or (isinstance(value, TableTensor) and value._rows is self._rows
                             and value._path == self._path):
            return  # as in ``weight.data += 1``, which has already written the rows
        if not isinstance(self, TableParameter):
            raise InvalidInputError(f"cannot set the data of a view of table {self._rows.name!r}",
                                    "shape of the view", tuple(self.shape), "the whole weight",
                                    "copy values into the view: view.copy_(values)")
        if tuple(value.shape) != tuple(self.shape) or value.dtype != self.dtype:
            raise InvalidInputError(f"cannot set the data of table {self._rows.name!r}",
                                    "shape, dtype", (tuple(value.shape), value.dtype),
                                    f"{tuple(self.shape)}, {self.dtype}",
                                    "change shape or dtype before the model is sharded")
        values = value.detach().clone() if isinstance(value, TableTensor) else value
        self._keep_views()
        self.detach().copy_(values)

    def _keep_views(self) -> None:
        """Let existing views of the table keep its current values. Collective.

        Assigning to ``data`` gives an ordinary tensor other memory, which earlier views do not
        refer to. Programs rely on it: ``kept = weight.data; weight.data = average; ...;
        weight.data = kept``.
        """
        rows = self._rows
        assert rows.views is not None
        views = [*rows.views.values()]
        if any(rows.tables.all_gather(bool(views))):  # reading may be collective
            kept = _KeptRows(rows)
            for view in views:
                view._rows = kept
            rows.views.clear()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return a read-only copy; read-only since writing to a copy would not change the rows."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. "
                               "Use tensor.detach().numpy() instead.")
        values: np.ndarray = self.detach().clone().numpy()
        values.flags.writeable = False
        return values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def _refuse_storage(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidInputError(f"cannot access the memory of table {self._rows.name!r}",
                                "tensor", type(self).__name__,
                                "a tensor with storage, which a sharded table does not have",
                                "take a copy: weight.detach().clone()")

    data_ptr = storage = share_memory_ = apply_ = _refuse_storage
    __dlpack__ = __dlpack_device__ = _refuse_storage

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return a meta-device storage of the table's size, shared by all views of the tensor.

        Tracers read the size from it and use it to recognize views of the same tensor.
        """
        return self._shape.untyped_storage()

    def tolist(self) -> list[Any]:
        """Return the values as nested lists, as ``torch.Tensor.tolist`` does."""
        return self.detach().clone().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec and self.dim() == 0 else repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = (f"{type(self).__name__}(table={self._rows.name!r}, shape={tuple(self.shape)}, "
                f"dtype={self.dtype}, requires_grad={self.requires_grad})")
        if self._rows.tables.is_one_domain and self.numel() <= 1000:  # printing is not collective
            text += f"\n{self.detach().clone()!r}"
        return text

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor with the current values."""
        return self.detach().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone()


class TableParameter(TableTensor):
    """``weight`` of a sharded module: an autograd leaf that ``named_parameters()`` yields.

    ``requires_grad`` decides whether lookups train the table. ``grad`` is always None: the backward
    pass updates the rows directly. A gradient from any operation other than a lookup raises
    InvalidInputError.
    """

    _is_param = True  # isinstance(x, torch.nn.Parameter) checks it
    _ddp_ignored = True  # for DistributedDataParallel's mixed precision

    @staticmethod
    def __new__(cls, tables: ShardedTables, name: str,
                requires_grad: bool) -> TableParameter:
        rows = TableRows(tables, name)
        shape = torch.empty(rows.shape, dtype=rows.dtype, device="meta")
        new = TableTensor.__new__(cls, rows, shape)
        assert isinstance(new, TableParameter)
        if tables.optimizers is not None:
            # Set by torch's apply_optimizer_in_backward, too.
            new._in_backward_optimizers = _NoOptimizers()
            new.requires_grad = requires_grad
            # All views share one version counter; this view does not keep the tables alive.
            rows.version = new.detach()
            del rows.version._rows
        rows.views = weakref.WeakValueDictionary()
        return new

    @property
    def tables(self) -> ShardedTables:
        """The collection that holds the table."""
        return self._rows.tables

    @property
    def requires_grad(self) -> bool:
        """Whether lookups train the table."""
        return bool(torch._C.TensorBase.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        tables = self._rows.tables
        if value and tables.optimizers is None:
            raise InvalidInputError(f"cannot train table {self._rows.name!r}", "requires_grad",
                                    value, "False for tables that were sharded for inference",
                                    "shard the model with objective='training'")
        torch._C.TensorBase.requires_grad.__set__(self, value)  # type: ignore[attr-defined]
        if tables.optimizers is not None:
            tables.frozen = tables.frozen - {self._rows.name} if value else (
                tables.frozen | {self._rows.name})
        if value and not self._post_accumulate_grad_hooks:
            super().register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _refuse_gradient)

    def detach(self) -> torch.Tensor:
        """Return a view that autograd does not track.

        Raises InvalidInputError if ``torch.nn.Parameter(weight)`` calls it: the new parameter
        would share the table's rows.
        """
        if sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
            raise InvalidInputError(f"cannot make a parameter of table {self._rows.name!r}",
                                    "tensor", type(self).__name__, "a tensor of its own",
                                    "pass a copy: weight.detach().clone()")
        return super().detach()

    def detach_(self) -> TableParameter:
        """Freeze the table, as ``detach_`` of a parameter does."""
        return self.requires_grad_(False)

    def register_hook(self, hook: Any) -> NoReturn:
        """Raise InvalidInputError: the table's gradient never exists as a tensor."""
        raise InvalidInputError(
            f"cannot hook the gradient of table {self._rows.name!r}", "hook", hook,
            "no hooks, since the table's gradient never exists as a tensor",
            "to clip, use the optimizer's max_gradient or max_row_norm; if this is "
            "apply_optimizer_in_backward, call it before sharding")

    register_post_accumulate_grad_hook = register_hook

    def requires_grad_(self, requires_grad: bool = True) -> TableParameter:
        """Train the table from now on, or freeze it; make the same call on all ranks."""
        self.requires_grad = requires_grad
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # torch.utils.swap_tensors
            raise InvalidInputError(f"cannot swap table {self._rows.name!r} with another tensor",
                                    "class", value.__name__, type(self).__name__,
                                    "copy values into it: weight.data.copy_(values)")
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        found = memo.get(id(self))
        if found is None:
            tables = copy.deepcopy(self._rows.tables, memo)
            found = memo[id(self)] = TableParameter(tables, self._rows.name, self.requires_grad)
        return found


class _NoOptimizers(list[Any]):
    """The in-backward optimizers of a table, which torch lists: none, and none can be added."""

    def append(self, optimizer: Any) -> NoReturn:
        raise InvalidInputError("cannot choose the optimizer of a sharded table",
                                "apply_optimizer_in_backward", type(optimizer).__name__,
                                "a call before oper.shard",
                                "tag the table before sharding, or pass optimizer= to oper.shard")


class _KeptRows:
    """Rows that a table had when its ``data`` was assigned, for views made before.

    Attributes: see `TableRows`.
    """

    version = views = None

    def __init__(self, rows: TableRows | _KeptRows) -> None:
        self.tables: ShardedTables = rows.tables
        self.name: str = rows.name
        self.shape: torch.Size = rows.shape
        self.dtype: torch.dtype = rows.dtype
        self._values = rows.read(0, self.shape[0])

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a copy of rows `[begin, end)`."""
        return self._values[begin:end].clone()

    def write(self, values: torch.Tensor, begin: int) -> None:
        """Write `values` to rows from `begin`."""
        self._values[begin:begin + values.shape[0]] = values


def _refuse_gradient(parameter: TableParameter) -> NoReturn:
    parameter.grad = None
    raise InvalidInputError(
        f"cannot take a gradient of table {parameter._rows.name!r}", "gradient",
        "from an operation on weight other than a lookup", "gradients from lookups only",
        "use weight.detach() outside of lookups (a regulariser, a tied projection), or "
        "leave this module out of modules=")


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: frozenset[str]
             ) -> Any:
    """Run an operator on copies of rows, and write back the arguments named `written`."""
    leaves = tree_leaves((args, kwargs))
    given = [x for x in leaves if isinstance(x, TableTensor)]
    if func.overloadpacket is _aten.set_:
        given[0]._refuse_storage()
    if written and torch.is_grad_enabled():
        _refuse_tracked(given[0], [x for x in leaves if isinstance(x, torch.Tensor)])
    copies: dict[int, _Copy] = {}
    for x in given:
        copies.setdefault(id(x._rows), _Copy(x._rows)).take(x)
    plain_of = {id(x): copies[id(x._rows)].view_of(x) for x in given}
    names = [a.name for a in func._schema.arguments]
    changed = [x for name, value in (*zip(names, args, strict=False), *kwargs.items())
               if name in written for x in tree_leaves(value) if isinstance(x, TableTensor)]

    def plain(x: Any) -> Any:
        return plain_of[id(x)] if isinstance(x, TableTensor) else x

    received = _received(func, args) if func.namespace == "c10d" else []
    layouts = {key: (x.shape, x.stride()) for key, x in plain_of.items()}
    out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if received:
        out[-1].wait()
        changed = received
    for x in changed:
        after = plain_of[id(x)]
        if (after.shape, after.stride()) != layouts[id(x)]:  # by resize_, t_, ...
            raise InvalidInputError(f"cannot change the shape of table {x._rows.name!r}",
                                    "shape, stride", (tuple(after.shape), after.stride()),
                                    f"{tuple(x.shape)}, {x.stride()}",
                                    "change the shape before the model is sharded")
    for copied in {id(c): c for c in (copies[id(x._rows)] for x in changed)}.values():
        copied.write_back()
    if torch.is_grad_enabled():
        for x in given:
            _note_reader(x)
    same = {id(plain_of[id(x)]): x for x in changed}
    return tree_map(lambda x: same.get(id(x), x), out)


def _received(func: Any, args: tuple[Any, ...]) -> list[TableTensor]:
    """Return the tables that a collective of ``torch.distributed`` will write, which its schema
    does not name; raises InvalidInputError if not all ranks would write the same."""
    name = func._schema.name.removeprefix("c10d::")
    tables = [x for x in tree_leaves(args[0]) if isinstance(x, TableTensor)]
    if tables and name not in ("allreduce_", "allreduce_coalesced_", "broadcast_", "send"):
        raise InvalidInputError(f"cannot receive into table {tables[0]._rows.name!r}",
                                "collective", name, "all_reduce or broadcast, on all ranks",
                                "receive into a tensor of its own, and copy it on all ranks")
    return [] if name == "send" else tables


def _refuse_tracked(table: TableTensor, arguments: list[torch.Tensor]) -> None:
    """Raise InvalidInputError if autograd would record the write of `arguments` to `table`."""
    for x in arguments:
        if not isinstance(x, TableTensor) and x.requires_grad:
            raise InvalidInputError(f"cannot write to table {table._rows.name!r}",
                                    "requires_grad of the values", True,
                                    "False, since autograd does not track writes to tables",
                                    "write values.detach(), or under torch.no_grad()")


class _Copy:
    """A copy of the table rows that an operator's arguments refer to."""

    def __init__(self, rows: TableRows | _KeptRows) -> None:
        self._rows = rows
        self._window: tuple[int, int] | None = None
        self._values: torch.Tensor | None = None

    def take(self, view: TableTensor) -> None:
        """Extend the range of rows to contain the argument `view`."""
        window = view._window()
        both = self._window is None or self._window == window
        self._window = window if both else (0, self._rows.shape[0])

    def view_of(self, view: TableTensor) -> torch.Tensor:
        """Return the plain tensor to pass to the operator in place of `view`."""
        assert self._window is not None
        if self._values is None:
            self._values = self._rows.read(*self._window).to(self._rows.tables.device)
        return view._taken_from(self._values, self._window[0])

    def write_back(self) -> None:
        """Write all copied rows back to the table. Collective, except for `_KeptRows`."""
        assert self._values is not None and self._window is not None
        if isinstance(self._rows, _KeptRows):
            self._rows.write(self._values, self._window[0])
            return
        tables = self._rows.tables
        tables.barrier()  # peers may still be reading
        self._rows.write(rank0_values(tables, self._values), self._window[0])
        tables.flush_replicas()


def _note_reader(tensor: TableTensor) -> None:
    """Make updates of the rows increment the version that autograd checks for saved tensors."""
    rows = tensor._rows
    if rows.version is not None:
        rows.tables.on_update.append(
            functools.partial(torch.autograd.graph.increment_version, rows.version))
        rows.version = None
