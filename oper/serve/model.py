"""A model whose weights are published once per host and read by all workers."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oper.errors import FileFormatError, InvalidInputError
from oper.integration.checkpoint.follow import Change
from oper.integration.checkpoint.weights import extra_value
from oper.serve.options import TieredRows, publish_options
from oper.serve.requests import Predictor, Request, Signature
from oper.support.files import read_json
from oper.tables import TableSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from oper.train.config import DynamicConfig

CONFIG, STATE = "config.json", "state.pt"  # as oper.train writes them


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
        read_folder: function from a training folder to weights that `publish` accepts.
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
        self.read_folder: Callable[[str | os.PathLike[str]], Any] = read_weights
        self._reads_again: Callable[[], Any] | None = None

    @property
    def publication_name(self) -> str:
        """Name of the publication that workers attach to."""
        return str(self._publication.name)

    def reads_again(self, read: Callable[[], Any]) -> PublishedModel:
        """Make `publish` without arguments publish the result of `read`; return the model."""
        self._reads_again = read
        return self

    def opener(self) -> Callable[[], Predictor]:
        """See `Source`."""
        return functools.partial(AttachedModel, self._build, self._publication.name,
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
        """See `Source`."""
        if isinstance(weights, Change):
            with _one_thread():
                prepared = self._publication.prepare(weights.rows, weights.dense)
            return lambda: int(self._publication.commit(prepared))
        if weights is None:
            if self._reads_again is None:
                raise InvalidInputError("cannot publish", "weights", None,
                                        "a module, state_dict, file or checkpoint folder",
                                        "pass the new weights")
            weights = self._reads_again()
        epoch = int(self._publication.publish(weights))
        return lambda: epoch

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes used on this host by ``tables``, ``dense`` weights and ``spare``."""
        return dict(self._publication.memory_bytes())

    def close(self) -> None:
        """See `Source`."""
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
        self._served: Any = oper.attach(model, name, fuse=True)

    @property
    def epoch(self) -> int:
        """See `Predictor`."""
        return int(self._served.epoch)

    @property
    def shares_bags(self) -> bool:
        """See `Predictor`."""
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
        with torch.no_grad(), self._served.pinned() as epoch:
            logits = self._served(torch.from_numpy(batch.dense), features, *shared)
            return torch.sigmoid(logits.reshape(-1)).numpy(), int(epoch)

    def rows_read(self) -> dict[str, int]:
        """See `Predictor`."""
        return dict(self._served.rows_read())

    def keys_read(self) -> dict[str, tuple[int, int]]:
        """See `Predictor`."""
        return {} if self._keys_read is None else dict(self._keys_read.counts)

    def close(self) -> None:
        """Detach from the publication."""
        self._served.close()


def build_trained(tables: tuple[TableSpec, ...], num_dense: int, config: dict[str, Any],
                  device: str, on_raw_ids: bool = False) -> nn.Module:
    """Build the DLRM of a training run, without its loss, on `device`.

    With `on_raw_ids`, it is an `OnRawIds`, which maps raw ids to rows first.
    """
    from oper.train.config import DLRMConfig
    from oper.train.model import build_dlrm

    # Importing TorchRec logs a warning that does not concern the user.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    model: Any = build_dlrm(tables, num_dense, DLRMConfig(**config), 0, device)
    if on_raw_ids:
        from oper.train.raw_ids import OnRawIds

        return OnRawIds(model.model, tables, device).eval()
    return typing.cast("nn.Module", model.model.eval())


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
    folder = Path(folder)
    tables, num_dense, config, dynamic = _describe(folder)
    on_raw_ids = dynamic is not None
    build = functools.partial(build_trained, tables, num_dense, config, on_raw_ids=on_raw_ids)
    rows = {f: None if on_raw_ids else t.num_rows for t in tables for f in t.features}
    signature = Signature(name, tuple(rows), tuple(rows.values()), num_dense)
    read_newest: Callable[[str | os.PathLike[str]], Any] = read_weights
    if dynamic is not None:
        read_newest = functools.partial(_read_on_raw_ids, build, tables,
                                        dynamic.time_to_live or None)
    numbering = _numbering(folder)

    def read(place: str | os.PathLike[str]) -> Any:
        found = _numbering(place)
        if numbering and found and found != numbering:  # clients would send other rows' numbers
            raise InvalidInputError(
                f"cannot publish the weights in {os.fspath(place)!r}", "numbering of their rows",
                found, f"{numbering}, the numbering of the weights in service",
                "start another server for them, whose clients use their vocabulary")
        return read_newest(place)

    model = PublishedModel(build, read_newest(folder), signature, row_dtype, keep_spare)
    model.read_folder = read
    return model.reads_again(functools.partial(read, folder))


def find_weights(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a training folder's newest weights.

    It is ``state.pt``, which ``oper train`` writes at its end, or the folder of the last
    checkpoint, whichever is newer.

    Raises:
        FileFormatError: there are none.
    """
    from oper.integration.checkpoint.files import METADATA
    from oper.train.resume import CHECKPOINT

    folder = Path(folder)
    found: list[tuple[int, Path]] = []
    for path in (folder / STATE, *(folder / name / METADATA
                                   for name in (CHECKPOINT, f"{CHECKPOINT}.previous"))):
        with contextlib.suppress(FileNotFoundError):  # missing, or being replaced
            found.append((path.stat().st_mtime_ns, path))
    if not found:
        raise FileFormatError(f"cannot serve {os.fspath(folder)!r}", "weights", "none",
                              f"{STATE} or {CHECKPOINT}/ in it",
                              "wait for the training's first checkpoint, or for its end")
    newest = max(found)[1]
    return newest.parent if newest.name == METADATA else newest


def read_weights(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor] | Path:
    """Return the newest weights of a training folder, in a form that `publish` accepts.

    They are the contents of ``state.pt``, named as in the model without its loss, or the path of a
    checkpoint.
    """
    from oper.train.model import load_state

    path = find_weights(folder)
    if path.name != STATE:
        return path
    return {name.removeprefix("model."): value for name, value in load_state(path).items()}


def _numbering(folder: str | os.PathLike[str]) -> str:
    """Return the identifier of the mapping from values to rows of a training folder's newest
    weights; "" if it is unknown."""
    path = find_weights(folder)
    if path.is_dir():
        return str(extra_value(path, "numbering") or "")
    try:
        return str(read_json(Path(folder) / CONFIG, CONFIG)["model"]["numbering"])
    except (OSError, FileFormatError, KeyError, TypeError):  # missing, or of an earlier version
        return ""


def _read_on_raw_ids(build: Callable[[str], Any], tables: tuple[TableSpec, ...],
                     time_to_live: int | None, folder: str | os.PathLike[str]
                     ) -> dict[str, torch.Tensor]:
    """Read the newest weights of a training run on raw ids, with static tables and key maps."""
    from oper.train.raw_ids import static_state

    return static_state(find_weights(folder), build("meta"), tables, time_to_live)


def _describe(folder: Path) -> tuple[tuple[TableSpec, ...], int, dict[str, Any],
                                     DynamicConfig | None]:
    """Read the configuration of a training folder.

    Returns:
        The first three arguments of `build_trained`, and the configuration of dynamic tables or
        None.
    """
    from oper.train.config import DynamicConfig

    what = f"cannot serve {os.fspath(folder)!r}"
    try:
        config = read_json(folder / CONFIG, f"{what}: {CONFIG}")
        layers: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v
                  for k, v in config["config"]["model"].items()}
        if layers.pop("name") != "dlrm":
            raise ValueError("not a DLRM")
        dynamic = DynamicConfig(**config["config"].get("dynamic", {}))
        model = config["model"]
        tables = tuple(TableSpec(str(t["name"]), int(t["num_rows"]), int(layers["dim"]),
                                 tuple(t["features"])) for t in model["tables"])
        return tables, int(model["num_dense"]), layers, dynamic if dynamic.is_on else None
    except (FileFormatError, InvalidInputError):
        raise
    except (ValueError, KeyError, TypeError, AttributeError, NotADirectoryError) as error:
        raise FileFormatError(what, CONFIG, f"{type(error).__name__}: {error}",
                              "the configuration of a DLRM and its tables",
                              "name the folder of a DLRM trained with this release") from None


def _load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Assign the tensors of `state` to a model on the meta device, without copying them."""
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise InvalidInputError(
            "the weights do not fit the model", "state", str(error).splitlines()[-1].strip(),
            "the model's names and shapes", "use weights and configuration of one run") from None
