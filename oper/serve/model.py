"""A model whose weights are published once per host and read by all workers."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from oper.errors import InvalidInputError
from oper.integration.checkpoint.follow import Change
from oper.serve.options import TieredRows, publish_options
from oper.serve.requests import Predictor, Request, Signature

if TYPE_CHECKING:
    import torch
    from torch import nn


def kjt_of(batch: Request, features: tuple[str, ...]) -> Any:
    """Convert the bags of a batch to a ``KeyedJaggedTensor`` with `features` as keys."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(
        list(features), torch.from_numpy(batch.ids),
        lengths=torch.from_numpy(batch.lengths.reshape(-1)), stride=batch.num_samples)


class PublishedModel:
    """A `Source` that publishes weights once on this host; workers attach to them.

    Args:
        build: ``build(device)`` returns a module on this device with ``forward(dense, kjt) ->
            logits [B]`` or ``[B, 1]``. Workers call it with ``"meta"``, since they use the
            published weights. It must be picklable: a top-level function, or a `functools.partial`
            of one.
        weights: weights of the first publication: a module that `build` returned, a ``state_dict``,
            or a file or checkpoint folder that `oper.Publication.publish` reads.
        signature: the model's inputs.
        row_dtype: dtype of published rows, ``"float32"``, ``"float16"``, ``"int8"`` or ``"int4"``,
            or `TieredRows` for dtypes by hotness; None = as in the model.
        keep_spare: retain the memory of the previous tables for the next publication instead of
            returning it to the system.

    Attributes:
        publication_name: name of the publication that workers attach to.
        read_folder: function from a training folder to weights that `publish` accepts; None =
            `oper.train.trained.read_weights`.
        changed_maps: function from the changed keys of a `Change` to the ``elements`` of
            `oper.Publication.apply`, for models with maps from keys to rows; None = no such maps.
    """

    def __init__(self, build: Callable[[str], nn.Module], weights: Any, signature: Signature,
                 row_dtype: str | TieredRows | None = None, keep_spare: bool = False) -> None:
        import oper

        self.signature, self._build = signature, build
        model, rest = weights, None
        if not hasattr(weights, "named_parameters"):
            model = build("meta")
            if isinstance(weights, Mapping):
                _load(model, weights)
            else:
                rest = weights
        # Several servers of one user may run on a host.
        name = f"{signature.name[:40]}-{os.getpid()}-{id(self) & 0xffffff:x}"
        self._publication: Any = oper.publish(model, name, weights=rest, keep_spare=keep_spare,
                                              **publish_options(row_dtype))
        self.publication_name = str(self._publication.name)
        self.read_folder: Callable[[str | os.PathLike[str]], Any] | None = None
        self.changed_maps: Callable[[Any], Any] | None = None
        self._reads_again: Callable[[], Any] | None = None

    def reads_again(self, read: Callable[[], Any]) -> PublishedModel:
        """Make `publish` without arguments publish the result of `read`; return the model."""
        self._reads_again = read
        return self

    def opener(self) -> Callable[[], Predictor]:
        return functools.partial(AttachedModel, self._build, self.publication_name,
                                 self.signature)

    def publish(self, weights: Any = None) -> int:
        """Publish new weights and return their epoch.

        `weights` is as for the constructor, or a `Change` of a training run, which is applied in
        place. None reads the model's training folder again.

        Raises:
            InvalidInputError: `weights` is None, and the model is not from a training folder or
                the folder's new weights number their rows differently.
        """
        return self.prepare(weights)()

    def prepare(self, weights: Any = None) -> Callable[[], int]:
        if isinstance(weights, Change):
            if weights.keys and self.changed_maps is None:
                raise InvalidInputError("cannot publish a delta", "dynamic tables",
                                        list(weights.keys), "none, in a model without key maps",
                                        "serve the folder of the run, or publish all weights")
            with _one_thread():
                prepared = self._publication.prepare(
                    weights.rows, weights.dense,
                    self.changed_maps(weights.keys) if self.changed_maps else None)
            return lambda: int(self._publication.commit(prepared))
        if weights is None:
            if self._reads_again is None:
                raise InvalidInputError("cannot publish", "weights", None,
                                        "a module, state_dict, file or checkpoint folder",
                                        "pass the new weights")
            weights = self._reads_again()
        epoch = int(self._publication.publish(weights))
        return lambda: epoch

    def stop_waiting(self) -> None:
        """End the wait of a publication for workers that still read older weights."""
        self._publication.stop_waiting()

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes used on this host by ``tables``, ``dense`` weights and ``spare``."""
        return dict(self._publication.memory_bytes())

    def close(self) -> None:
        self._publication.close()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: for many small tensors, its threads would spin on the workers'
    cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class AttachedModel:
    """A worker's `Predictor`, which uses published weights.

    Args:
        build, signature: as for `PublishedModel`.
        name: name of the publication.
    """

    def __init__(self, build: Callable[[str], nn.Module], name: str, signature: Signature) -> None:
        import oper

        self.signature = signature
        self._last_shared: tuple[tuple[int, ...], Any] = (), None  # cached: features, their mask
        model = build("meta")
        self._keys_read: Any = getattr(model, "keys_read", None)
        served: Any = oper.attach(model, name, fuse=True)
        self._served, self.close = served, served.close
        self.rows_read, self.trace_lookups = served.rows_read, served.trace_lookups

    @property
    def epoch(self) -> int:
        return int(self._served.epoch)

    @property
    def shares_bags(self) -> bool:
        return bool(self._served.shares_bags)

    def predict(self, batch: Request) -> tuple[np.ndarray, int]:
        """Return probabilities float32 [B], the sigmoid of the model's logits, and the epoch."""
        import torch

        shared: list[torch.Tensor] = []
        if batch.shared and self.shares_bags:
            if self._last_shared[0] != batch.shared:
                self._last_shared = batch.shared, torch.tensor(
                    [k in batch.shared for k in range(len(self.signature.features))])
            shared = [torch.from_numpy(batch.firsts()), self._last_shared[1]]
        else:
            batch = batch.expanded()
        features = kjt_of(batch, self.signature.features)
        with self._served.pinned() as epoch:  # `ServedModel` disables gradients
            logits = self._served(torch.from_numpy(batch.dense), features, *shared)
            # NumPy has no bfloat16.
            return torch.sigmoid(logits.reshape(-1).float()).numpy(), int(epoch)

    def keys_read(self) -> dict[str, tuple[int, int]]:
        return {} if self._keys_read is None else dict(self._keys_read.counts)

    def take_lookups(self) -> list[tuple[float, float]]:
        return [(s.begin_ns / 1e9, s.end_ns / 1e9) for s in self._served.take_lookups()]


def load_model(folder: str | os.PathLike[str], name: str = "dlrm",
               row_dtype: str | TieredRows | None = None, keep_spare: bool = False
               ) -> PublishedModel:
    """Publish the model that ``oper train`` has written to `folder` on this host.

    Args:
        folder: a folder with ``config.json``, and ``state.pt`` or a checkpoint (see
            `find_weights`).
        name: name of the model on the server.
        row_dtype, keep_spare: see `PublishedModel`.

    Raises:
        FileFormatError: the folder is not from ``oper train``, or is damaged.
        FileNotFoundError: the folder does not exist.
    """
    from oper.train.trained import TrainedRun

    run = TrainedRun(folder)
    signature = Signature(name, tuple(run.features), tuple(run.features.values()), run.num_dense)
    model = PublishedModel(run.build, run.read(), signature, row_dtype, keep_spare)
    model.read_folder, model.changed_maps = run.read, run.changed_maps
    return model.reads_again(run.read)


def _load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Assign the tensors of `state` to a model on the meta device, without copying them."""
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise InvalidInputError(
            "the weights do not fit the model", "state", str(error).splitlines()[-1].strip(),
            "the model's names and shapes", "use weights and configuration of one run") from None
