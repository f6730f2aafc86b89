"""The weights and the model that a training run has written to its folder, for servers."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from oper.errors import FileFormatError, InvalidInputError
from oper.integration.checkpoint.delta_files import base_of, folder_of
from oper.integration.checkpoint.files import METADATA, present_and_previous
from oper.integration.checkpoint.follow import KeyChange
from oper.integration.checkpoint.weights import extra_value
from oper.integration.keys.key_slots import Elements
from oper.shmem.keys.rules import DynamicTable
from oper.support.files import read_json
from oper.tables import TableSpec
from oper.train.config import DynamicConfig
from oper.train.model import load_state
from oper.train.raw_ids import build_trained, changed_maps, served_state
from oper.train.resume import CHECKPOINT, CONFIG, STATE


class TrainedRun:
    """A training run of a DLRM, as described by its folder.

    Args:
        folder: the run's folder.

    Attributes:
        tables: its tables.
        num_dense: number of dense columns.
        rule: settings of its dynamic tables; None if its tables are static.
        build: ``build(device)`` returns the model, see `build_trained`.

    Raises:
        FileFormatError: the folder is not from ``oper train``, or is damaged.
        FileNotFoundError: the folder does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        what = f"cannot serve {os.fspath(folder)!r}"
        try:
            config = read_json(self._folder / CONFIG, f"{what}: {CONFIG}")
            layers: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v
                                      for k, v in config["config"]["model"].items()}
            if layers.pop("name") != "dlrm":
                raise ValueError("not a DLRM")
            model = config["model"]
            self.tables = tuple(TableSpec(str(t["name"]), int(t["num_rows"]), int(layers["dim"]),
                                          tuple(t["features"])) for t in model["tables"])
            self.num_dense = int(model["num_dense"])
            self.rule = _rule(config)
        except (FileFormatError, InvalidInputError):
            raise
        except FileNotFoundError as error:
            if not self._folder.is_dir():
                raise
            raise FileFormatError(what, CONFIG, "missing", "the file that oper train writes first",
                                  "name the output folder of oper train") from error
        except (ValueError, KeyError, TypeError, AttributeError, NotADirectoryError) as error:
            raise FileFormatError(what, CONFIG, f"{type(error).__name__}: {error}",
                                  "the configuration of a DLRM and its tables",
                                  "name the folder of a DLRM trained with this release") from None
        self.build = functools.partial(build_trained, self.tables, self.num_dense, layers,
                                       seed=None if self.rule is None else self.rule.seed)
        self._numbering = _numbering(folder)

    @property
    def features(self) -> dict[str, int | None]:
        """Rows of every feature's table; None if its ids are raw."""
        return {f: t.num_rows if self.rule is None else None
                for t in self.tables for f in t.features}

    def read(self, folder: str | os.PathLike[str] | None = None) -> dict[str, torch.Tensor] | Path:
        """Return the newest weights of this or another folder, for `oper.Publication.publish`.

        They are those of `read_weights`, or if tables are dynamic, a ``state_dict`` of `build`'s
        model.

        Raises:
            InvalidInputError: the other folder's weights number their rows differently.
            FileFormatError: the folder has no weights, or they are damaged.
        """
        place = self._folder if folder is None else folder
        found = _numbering(place)
        if self._numbering and found and found != self._numbering:
            # Clients would send the numbers of other rows.
            raise InvalidInputError(
                f"cannot publish the weights in {os.fspath(place)!r}", "numbering of their rows",
                found, f"{self._numbering}, the numbering of the weights in service",
                "start another server for them, whose clients use their vocabulary")
        if self.rule is None:
            return read_weights(place)
        return served_state(find_weights(place), self.build("meta"), self.tables,
                            self.rule.seed, self._time_to_live(place))

    def _time_to_live(self, folder: str | os.PathLike[str]) -> int | None:
        """Return the time to live of keys in another folder, or in this one, whose run may have
        been resumed with another; by default this run's."""
        assert self.rule is not None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            rule = _rule(read_json(Path(folder) / CONFIG, CONFIG))
            return self.rule.time_to_live if rule is None else rule.time_to_live
        return self.rule.time_to_live

    def changed_maps(self, keys: Mapping[str, KeyChange]) -> dict[str, Elements]:
        """Return the elements of the maps from keys to rows that change with the keys of a
        `Change`, by ``state_dict`` key of each map; {} if the tables are static."""
        return {} if self.rule is None else changed_maps(self.tables, self.rule.seed, keys)


def _rule(config: Any) -> DynamicTable | None:
    """Return the settings of dynamic tables in `config`, a parsed ``config.json``."""
    dynamic = DynamicConfig(**config["config"].get("dynamic", {}))
    return dynamic.rule(int(config["config"]["seed"])) if dynamic.is_on else None


def find_weights(folder: str | os.PathLike[str]) -> Path:
    """Return the path of a training folder's newest weights.

    It is ``state.pt``, which ``oper train`` writes at its end, or the folder of the last
    checkpoint, whichever is newer. A checkpoint is as new as its last delta: a run that has ended
    and is resumed continues the deltas of its checkpoint.

    Raises:
        FileFormatError: there are none.
    """
    folder = Path(folder)
    place, found = folder / CHECKPOINT, list[tuple[int, Path]]()
    for path in (folder / STATE, *(x / METADATA for x in present_and_previous(place))):
        with contextlib.suppress(FileNotFoundError):  # missing, or being replaced
            found.append((path.stat().st_mtime_ns, path))
            if path.name == METADATA:
                deltas = folder_of(place) / base_of(path.parent)
                # Copies of a run have only the files' times from their store. No file of the last
                # delta may be complete yet.
                lasts = sorted(x for x in deltas.iterdir() if x.is_dir())[-2:]
                found += [(x.stat().st_mtime_ns, path) for d in lasts for x in d.glob("rank-*")]
    if not found:
        raise FileFormatError(f"cannot serve {os.fspath(folder)!r}", "weights", "none",
                              f"{STATE} or {CHECKPOINT}/ in it",
                              "wait for the training's first checkpoint, or for its end")
    newest = max(found)[1]
    return newest.parent if newest.name == METADATA else newest


def read_weights(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor] | Path:
    """Return the newest weights of a training folder, for `oper.Publication.publish`.

    They are the contents of ``state.pt``, named as in the model without its loss, or the path of a
    checkpoint.
    """
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
