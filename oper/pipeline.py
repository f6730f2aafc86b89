"""Training steps split into micro-batches, whose exchanges overlap with dense computation."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oper.errors import InvalidInputError
from oper.integration.prefetch import are_same
from oper.integration.splitting import detached, features_in, joined, split_batch
from oper.sharding import micro_batches, tables_of
from oper.shmem.micro_batches import why_not_in_parts
from oper.shmem.tables import ShardedTables

# Values of num_parts that are measured. Dense gradients are averaged during the last part's
# backward pass: a larger last part hides more of that, and the first part is looked up sooner.
_TRIED: tuple[int | tuple[int, ...], ...] = (1, 2, (1, 2), 3, 4, 6)
_TRIED_STEPS = 3  # steps measured with each value; the first one is discarded


class MicroBatchPipeline:
    """Training loop body that overlaps exchanges between hosts with the dense layers.

    Used like TorchRec's train pipelines. Each step splits its batch by samples into `num_parts`
    parts. While the dense layers of one part compute, the next part is looked up and the table
    gradients of the previous part are exchanged. Tables and dense parameters are updated once,
    after the last part. The result equals that of complete batches up to the order of additions if
    the loss is a mean over samples and the model treats samples independently (no batch
    normalisation). A row that several parts look up is sent once per part. With one part,
    exchanges overlap with the layers that do not depend on them; on a single host there is nothing
    to overlap. A collection is looked up ahead only if the model passes it unmodified features of
    the batch, which the first step detects.

    Args:
        model: a sharded model, which may be wrapped in DistributedDataParallel (with
            ``static_graph=True`` the first batch is not split); ``model(batch)`` returns the loss,
            or a tuple that begins with it.
        optimizer: optimizer of the dense parameters, or None.
        num_parts: parts per batch, or their sizes in proportion, such as (1, 2); the same on all
            ranks. Every part must have a sample. None = 1, 2, (1, 2), 3, 4 and 6 parts are timed
            for three steps each, if batches have enough samples, and the value with the shortest
            step on the slowest rank is chosen.
        split: ``split(batch, num_parts)`` returns the parts and their numbers of samples; by
            default `oper.integration.splitting.split_batch`.

    Raises:
        InvalidInputError: the model has no sharded tables, or a number in `num_parts` is not an
            integer >= 1.

    Attributes:
        num_parts: see above; None while it is measured.

    Example:
        >>> import torch, oper
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.bag = torch.nn.EmbeddingBag(100, 8, mode="sum")
        ...         self.top = torch.nn.Linear(8, 1)
        ...     def forward(self, ids):
        ...         return self.top(self.bag(ids)).square().mean()
        >>> model = oper.shard(Model(), optimizer=oper.SGD(lr=0.1))
        >>> optimizer = torch.optim.SGD(model.top.parameters(), lr=0.1)
        >>> pipeline = oper.MicroBatchPipeline(model, optimizer, num_parts=2)
        >>> loss = pipeline.progress(iter([torch.arange(12).reshape(6, 2)]))
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
                 num_parts: int | Sequence[int] | None = None,
                 split: Callable[[Any, Any], tuple[list[Any], list[int]]] | None = None) -> None:
        self._tables: list[ShardedTables] = tables_of(model, "cannot train in parts")
        given = (1,) if num_parts is None else num_parts if isinstance(num_parts, Sequence) else (
            num_parts,)
        if not given or any(type(x) is not int or x < 1 for x in given):
            raise InvalidInputError("cannot train in parts", "num_parts", num_parts,
                                    "an integer >= 1, several of them, or None",
                                    "pass for example 4 or (1, 2)")
        self.num_parts = num_parts
        self._model, self._optimizer = model, optimizer
        self._split = split or split_batch
        self._wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        # DistributedDataParallel cannot learn a static graph from passes under its no_sync().
        self._learns_graph = any(w.static_graph for w in self._wrappers)
        self._collections: list[Any] = [
            m for m in model.modules() if hasattr(m, "tables") and hasattr(m, "prefetch")]
        # The collections that get unmodified features of the batch, which can therefore be looked
        # up before the model calls them. None until the first step, which detects them.
        self._direct: list[Any] | None = None
        self._seconds: dict[Any, list[float]] = {
            k: [] for k in _TRIED if split is None or isinstance(k, int)}

    def progress(self, batches: Iterator[Any]) -> Any:
        """Train the next batch; raises StopIteration if `batches` is exhausted. Collective.

        Returns:
            The model's output for the complete batch, detached: tensors of the parts concatenated
            along the samples, scalars such as the loss averaged over the samples.
        """
        batch = next(batches)
        num_parts = 1 if self._learns_graph else self.num_parts or self._tried(batch)
        begin = time.perf_counter()
        out = self._step(batch, num_parts)
        self._learns_graph = False
        if self.num_parts is None:
            self._note(num_parts, time.perf_counter() - begin)
        return out

    def _tried(self, batch: Any) -> int | Sequence[int]:
        """Return the value of `num_parts` to time next, skipping those for which some rank's batch
        has too few samples."""
        for k in self._seconds:
            if len(self._seconds[k]) < _TRIED_STEPS:
                if k == 1 or all(self._tables[0].all_gather(self._can_split(batch, k))):
                    return k
                self._seconds[k] = [math.inf] * _TRIED_STEPS
        return self._choose()

    def _can_split(self, batch: Any, num_parts: int | Sequence[int]) -> bool:
        try:
            self._split(batch, num_parts)
        except InvalidInputError:
            return False
        return True

    def _note(self, num_parts: int | Sequence[int], seconds: float) -> None:
        self._seconds[num_parts].append(seconds)
        if all(len(s) >= _TRIED_STEPS for s in self._seconds.values()):
            self._choose()

    def _choose(self) -> int | Sequence[int]:
        mine = [min(s[1:]) for s in self._seconds.values()]
        slowest = [max(of) for of in zip(*self._tables[0].all_gather(mine), strict=True)]
        best: int | Sequence[int] = [*self._seconds][slowest.index(min(slowest))]
        self.num_parts = best
        return best

    def _step(self, batch: Any, num_parts: int | Sequence[int]) -> Any:
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        parts, sizes = ([batch], [1]) if num_parts == 1 else self._split(batch, num_parts)
        found, direct = [], self._direct
        with contextlib.ExitStack() as stack:
            if direct is None:
                direct = stack.enter_context(self._watched(parts))
            if len(parts) > 1 or self._hides_whole():
                stack.enter_context(micro_batches(self._model, len(parts)))
                self._start(parts[0])
            for k, part in enumerate(parts):
                if k + 1 < len(parts):
                    self._start(parts[k + 1])
                with contextlib.ExitStack() as last_only:
                    for wrapper in self._wrappers if k + 1 < len(parts) else ():
                        last_only.enter_context(wrapper.no_sync())
                    out = self._model(part)
                    loss = out if isinstance(out, torch.Tensor) else out[0]
                    (loss if len(parts) == 1 else loss * (sizes[k] / sum(sizes))).backward()
                found.append(detached(out))
        self._direct = direct
        if self._optimizer is not None:
            self._optimizer.step()
        return found[0] if len(found) == 1 else joined(found, sizes)

    def _hides_whole(self) -> bool:
        """Whether the exchanges of a whole batch may overlap with layers that do not depend on the
        tables."""
        return not self._learns_graph and all(
            not x.is_one_domain and not why_not_in_parts(x) for x in self._tables)

    @contextlib.contextmanager
    def _watched(self, parts: Sequence[Any]) -> Iterator[list[Any]]:
        """Find the sharded collections that the model calls with features of `parts` unmodified.

        Yields a list, to which each such collection is added when it is called in the block.
        """
        given = {id(x.values()): x for part in parts for x in features_in(part)}
        direct: list[Any] = []

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling():  # compiled graphs cannot use prefetched lookups
                return
            used = features_in([args, kwargs])
            if module not in direct and any(
                    id(x.values()) in given and are_same(x, given[id(x.values())]) for x in used):
                direct.append(module)

        hooks = [m.register_forward_pre_hook(look, with_kwargs=True) for m in self._collections]
        try:
            yield direct
        finally:
            for hook in hooks:
                hook.remove()

    def _start(self, part: Any) -> None:
        """Start a part's lookups, for each collection whose features are all in exactly one input.
        """
        inputs = features_in(part)
        for module in self._direct or ():
            fit = [x for x in inputs if set(module.features) <= set(x.keys())]
            if len(fit) == 1:
                module.prefetch(fit[0])
