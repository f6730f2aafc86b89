"""Checkpoints of a training run, and continuing from the last one after a crash."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from oper.data import Folder
from oper.errors import DeadlineError, FileFormatError, InvalidInputError, OperError, require
from oper.integration.checkpoint.deltas import DeltaCheckpoints
from oper.integration.checkpoint.files import METADATA, place_of, present_and_previous
from oper.integration.checkpoint.folders import Folders
from oper.integration.checkpoint.saving import load_checkpoint, save_checkpoint
from oper.integration.checkpoint.survivors import Survivors
from oper.support.files import read_json, write_text
from oper.train.config import TrainConfig
from oper.train.engines import Engine
from oper.train.model import ranks

_log = logging.getLogger(__name__)
CHECKPOINT, CONFIG, STATE = "checkpoint", "config.json", "state.pt"
# In a folder that has an earlier run, until another run has replaced it.
EARLIER = ".earlier-run"


def is_restart() -> bool:
    """Whether torchrun has restarted this process after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0


def continues(out: str | os.PathLike[str]) -> bool:
    """Whether torchrun has restarted this process, and the run in `out` is the one to continue: not
    an earlier one, because of which the first attempt was refused, or which it was to replace."""
    return is_restart() and not (Path(out) / EARLIER).exists()


def has_checkpoint(out: str | os.PathLike[str]) -> bool:
    """Whether the folder `out` of a run has a complete checkpoint."""
    return any((x / METADATA).exists() for x in present_and_previous(Path(out) / CHECKPOINT))


def forgotten(out: str | os.PathLike[str]) -> Folders | None:
    """Return the folders of an earlier run's checkpoint, from which this run could otherwise
    resume, for their removal; None if there is nothing to remove.

    If ``out/checkpoint`` is a symbolic link, this run saves its checkpoints in the link's target,
    as `oper.save_checkpoint` does. Neither the link nor its target is removed: a checkpoint there
    may belong to another run.

    Raises:
        InvalidInputError: there is a checkpoint in the target of a link; or the folders hold
            anything but a checkpoint.
    """
    what, place = "cannot start a new run", Path(out) / CHECKPOINT
    if place.is_symlink():
        require(what, f"remove it, if no other run uses it, or the link {str(place)!r}",
                ("checkpoint", str(place_of(place)), not has_checkpoint(out),
                 "none in the target of a symbolic link"))
        return None
    folders = Folders(place_of(place))
    folders.check(what)
    return folders


class Checkpoints:
    """Saves and restores the complete state of a run.

    Tables and their optimizer states are saved in logical order, so that runs can resume on any
    number of ranks. The dense optimizer's state is the same on all ranks. Generators are not saved,
    since the random numbers of a step depend only on seed, rank and step (`oper.train.tasks`).

    Args:
        engine: the model.
        config: the run's configuration.
        samples: result of `Task.samples`.

    Raises:
        InvalidInputError: the model has no collections sharded by OPER.
    """

    def __init__(self, engine: Engine, config: TrainConfig, samples: Mapping[str, str]) -> None:
        from torchrec.optim.keyed import CombinedOptimizer

        from oper.integration.torchrec_modules import ShardedEmbeddingBags, ShardedEmbeddings

        self._engine, self._config, self._samples = engine, config, samples
        self._folder = Path(config.out) / CHECKPOINT
        sharded = {name: m.fused_optimizer for name, m in engine.bare.named_modules()
                   if isinstance(m, ShardedEmbeddingBags | ShardedEmbeddings)}
        if not sharded:
            raise InvalidInputError(
                "cannot save or load checkpoints", "sharded collections of tables", 0,
                ">= 1", "train with sharding='oper', or without checkpoints")
        self._tables = CombinedOptimizer(list(sharded.items()))
        self._deltas = DeltaCheckpoints(self._folder, engine.module, self._tables) if (
            config.delta_every) else None
        try:
            self._survivors = Survivors(engine.module, self._tables) if (
                config.checkpoint_every) else None
        except InvalidInputError:  # ranks do not share memory, or tables are dynamic
            self._survivors = None
        self._step = 0

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._survivors and self._step and kind and issubclass(
                kind, (DeadlineError, RuntimeError)):  # PeerLostError is a RuntimeError
            try:
                if self._survivors.save(self._folder, self._extra(self._step)):
                    _log.warning("step %d has been saved without the missing ranks", self._step)
            except OperError as error:
                _log.info("%s", error)
        if self._deltas is not None:
            try:
                self._deltas.close()
            except OperError as error:  # a delta that could not be written does not fail the run
                if kind is None or not issubclass(kind, OperError):  # otherwise already reported
                    _log.warning("%s", error)

    def after(self, step: int, interrupted: bool = False) -> None:
        """Save the checkpoint or delta that is due after `step`, if any; if the run is interrupted
        and saves checkpoints, a checkpoint is due. Collective."""
        config, self._step = self._config, step
        if self._survivors:
            self._survivors.mark()
        if config.checkpoint_every and (interrupted or step % config.checkpoint_every == 0):
            if self._deltas is None:
                save_checkpoint(self._folder, self._engine.module, self._tables, self._extra(step))
            else:
                self._deltas.save_full(step, self._extra(step))
        elif self._deltas is not None and step % config.delta_every == 0:
            self._deltas.save(step, self._extra(step))

    def _extra(self, step: int) -> dict[str, Any]:
        data = io.BytesIO()
        torch.save([o.state_dict() for o in self._engine.optimizers], data)
        samples = {"samples": dict(self._samples)} if self._samples else {}
        return {"step": step, "numbering": self._numbering(), **samples,
                "global_batch_size": self._config.batch_size * ranks()[1],
                "seed": self._config.seed, "shuffle": self._config.shuffle,
                "dense": torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)}

    def _numbering(self) -> str:
        """Return the identifier of the data's mapping from values to rows; "" if there is none."""
        if not self._config.data:
            return ""
        return str(Folder.open(self._config.data, allow_raw=True).manifest.get("numbering", ""))

    def load(self) -> int:
        """Load the last checkpoint and return its step. Collective.

        Raises:
            InvalidInputError: this run and the saved one differ in the samples or their order, the
                numbering of rows, or dynamic tables.
        """
        what = f"cannot continue from {str(self._folder)!r}"
        self._check_dynamic(self._config.out, what)
        extra = (self._deltas.load().extra if self._deltas is not None else
                 load_checkpoint(self._folder, self._engine.module, self._tables))
        old, new = str(extra.get("numbering", "")), self._numbering()
        if old and new and old != new:
            raise InvalidInputError(
                what, "numbering of the rows in the checkpoint", old,
                f"{new}, the numbering of {self._config.data!r}",
                "use the data with which the run was started, or start over with --force")
        for key in ("interactions", "data"):
            self._check_samples(extra, what, key,
                                "use the data, [interactions] and [catalogue] with which the run "
                                "was started, start a run on other data with 'start', or start "
                                "over with --force")
        step, saved = self._take_dense(extra, what)
        mine = {"global_batch_size": self._config.batch_size * ranks()[1],
                "seed": self._config.seed, "shuffle": self._config.shuffle}
        if mine != saved:
            raise InvalidInputError(
                what, "global batch size, seed, shuffle", tuple(mine.values()),
                f"{tuple(saved.values())} as in the saved run, for the same samples in every step",
                "with another number of ranks, set batch_size so that batch_size * ranks stays the "
                "same")
        return step

    def start_from(self, out: str | os.PathLike[str]) -> None:
        """Load another run's last checkpoint, whose tables may have fewer rows. Collective.

        Weights and optimizer states are loaded, but not learning rates and other options.

        Raises:
            InvalidInputError: the runs differ in dynamic tables, or in the numbering of rows
                without a re-map between them.
        """
        folder = Path(out) / CHECKPOINT
        self._check_dynamic(out, f"cannot start from {str(folder)!r}")
        extra = load_checkpoint(folder, self._engine.module, self._tables, grown=True,
                                remap=self._config.remap or None)
        old, new = str(extra.get("numbering", "")), self._numbering()
        if old and new and (old == new) == bool(self._config.remap):
            todo = "leave remap out"
            if old != new:
                todo = ("set remap to the file that 'oper vocabulary extend --reorder' wrote, or "
                        "use data with the same vocabulary")
            if old != new and all(x.startswith("raw ids") for x in (old, new)):
                todo = ("preprocess both the same way: the key of a string is its hash, which "
                        "differs from the key of the same number")
            raise InvalidInputError(
                f"cannot start from {str(folder)!r}", "numbering of the rows in the checkpoint",
                old, f"{new}, the numbering of {self._config.data!r}" if old != new else
                "a numbering that differs from the data's, since remap is set", todo)
        # Training counts number the users and items of a recommender.
        self._check_samples(extra, f"cannot start from {str(folder)!r}", "numbering",
                            "start from a run on the same interactions, or start a new run")
        step, _ = self._take_dense(extra, f"cannot start from {str(folder)!r}")
        _log.info("starting from step %d of %s", step, folder)

    def _check_samples(self, extra: Mapping[str, Any], what: str, key: str, todo: str) -> None:
        """Raise InvalidInputError if the entries `key` of `samples` differ; checkpoints of earlier
        versions have none."""
        old, new = extra.get("samples", {}).get(key, ""), self._samples.get(key, "")
        if old and new and old != new:
            name = "numbering of users and items" if key == "numbering" else key
            raise InvalidInputError(what, f"{name} in the checkpoint", old,
                                    f"{new}, as in this run", todo)

    def _check_dynamic(self, out: str | os.PathLike[str], what: str) -> None:
        """Raise InvalidInputError if dynamic tables of the run in `out` differ from this run's.
        Loading would fail as well, but with an error that names only sizes."""
        try:
            saved = read_json(Path(out) / CONFIG, what)["config"]
            theirs = _places(saved["dynamic"], saved["seed"])
        except (OSError, FileFormatError, KeyError, TypeError):
            return  # the other run's configuration is missing
        mine = _places(asdict(self._config.dynamic), self._config.seed)
        if mine != theirs:
            raise InvalidInputError(
                what, "dynamic tables", mine, f"{theirs}, as in {os.fspath(out)!r}",
                "set the same values, which determine the rows of keys, or convert the tables by "
                "oper.KeyedRows")

    def _take_dense(self, extra: dict[str, Any], what: str) -> tuple[int, dict[str, Any]]:
        """Load the dense optimizers' states, but not their learning rates and other options, which
        are those of this run's configuration, as the tables' are.

        Returns:
            The step, and the settings that determine the samples of a step.

        Raises:
            InvalidInputError: the saved run has another dense optimizer.
        """
        try:
            step, dense = int(extra["step"]), extra["dense"]
            states = torch.load(io.BytesIO(dense.numpy().tobytes()), weights_only=True)
            saved = {k: extra[k] for k in ("global_batch_size", "seed", "shuffle")}
        except (KeyError, AttributeError, RuntimeError) as error:
            raise FileFormatError(what, "content", str(error), "a checkpoint of oper train",
                                  "start over with --force") from None
        for optimizer, state in zip(self._engine.optimizers, states, strict=True):
            own = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            theirs = [g.keys() - {"params"} for g in state["param_groups"]]
            if [set(options) for options in own] != theirs:
                raise InvalidInputError(what, "optimizer.dense", self._config.optimizer.dense,
                                        "the dense optimizer of the saved run",
                                        "set the same one, or start a new run")
            optimizer.load_state_dict(state)
            for group, options in zip(optimizer.param_groups, own, strict=True):
                group.update(options)
        return step, saved


def _places(dynamic: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the settings that determine the rows of keys in dynamic tables."""
    size = {"dynamic.rows": dynamic["rows"]}
    if dynamic.get("bytes"):
        size = {"dynamic.bytes": dynamic["bytes"]}
    elif not dynamic["rows"]:
        return size
    return {**size, "dynamic.tables": dynamic["tables"],
            "dynamic.admit_after > 1": dynamic["admit_after"] > 1, "seed": seed}


def cut_metrics(path: Path, step: int, validates: bool) -> None:
    """Remove the lines after `step` from a metrics file, and if `validates` the ``valid`` line of
    `step`; the resumed run writes them again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError:  # an incomplete line
            continue
        last = step - 1 if validates and entry.get("event") == "valid" else step
        if entry.get("event") != "end" and entry.get("step", 0) <= last:
            kept.append(line)
    write_text(path, "".join(f"{line}\n" for line in kept))
