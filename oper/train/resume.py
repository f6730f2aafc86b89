"""Checkpoints of a training run, and going on from the last one after a crash."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from oper.errors import FileFormatError, InvalidInputError, fail
from oper.files import write_text
from oper.integration.checkpoint_files import METADATA
from oper.integration.saving import load_checkpoint, save_checkpoint
from oper.train.config import TrainConfig
from oper.train.engines import Engine
from oper.train.model import ranks

CHECKPOINT = "checkpoint"


def is_restart() -> bool:
    """Whether torchrun has started this process in place of one that failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0


def has_checkpoint(out: str | os.PathLike[str]) -> bool:
    """Whether a run has left a checkpoint in its folder."""
    return any((Path(out) / name / METADATA).exists()
               for name in (CHECKPOINT, f"{CHECKPOINT}.previous"))


def forget_checkpoint(out: str | os.PathLike[str]) -> None:
    """Remove what an earlier run has left, from which this one must not go on after a crash."""
    for suffix in ("", ".previous", ".saving"):
        folder = Path(out) / f"{CHECKPOINT}{suffix}"
        if folder.is_dir():
            shutil.rmtree(folder)


class Checkpoints:
    """Saves and restores everything that the next step depends on.

    Tables and their optimizer states are saved in logical order, so that any number of ranks can go
    on. The dense optimizer, which is the same on all ranks, is saved whole.
    """

    def __init__(self, engine: Engine, config: TrainConfig) -> None:
        from oper.integration.torchrec_modules import ShardedEmbeddingBags

        self._engine, self._config = engine, config
        self._folder = Path(config.out) / CHECKPOINT
        sharded = [m for m in engine.bare.modules() if isinstance(m, ShardedEmbeddingBags)]
        if not sharded:
            raise InvalidInputError(fail("cannot save or load checkpoints", "sharding",
                                         config.sharding, "'oper'", "train without checkpoints"))
        self._tables = sharded[0].fused_optimizer

    def save(self, step: int) -> None:
        """Save the state after so many steps. Collective."""
        data = io.BytesIO()
        torch.save([o.state_dict() for o in self._engine.optimizers], data)
        save_checkpoint(self._folder, self._engine.module, self._tables, {
            "step": step, "global_batch_size": self._config.batch_size * ranks()[1],
            "seed": self._config.seed, "shuffle": self._config.shuffle,
            "dense": torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)})

    def load(self) -> int:
        """Load the last checkpoint; returns the steps that led to it. Collective.

        Raises:
            InvalidInputError: the run has another order of samples than the saved one.
        """
        extra = load_checkpoint(self._folder, self._engine.module, self._tables)
        what = f"cannot go on from {str(self._folder)!r}"
        try:
            step, dense = int(extra["step"]), extra["dense"]
            states = torch.load(io.BytesIO(dense.numpy().tobytes()), weights_only=True)
            saved = {k: extra[k] for k in ("global_batch_size", "seed", "shuffle")}
        except (KeyError, AttributeError, RuntimeError) as error:
            raise FileFormatError(fail(what, "content", str(error), "a checkpoint of oper train",
                                       "start the run anew with --force")) from None
        mine = {"global_batch_size": self._config.batch_size * ranks()[1],
                "seed": self._config.seed, "shuffle": self._config.shuffle}
        if mine != saved:
            raise InvalidInputError(fail(
                what, "global batch size, seed, shuffle", tuple(mine.values()),
                f"{tuple(saved.values())}, those of the saved run: the same samples in every step",
                "with other ranks set batch_size so that batch_size * ranks stays"))
        for optimizer, state in zip(self._engine.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        return step


def cut_metrics(path: Path, step: int) -> None:
    """Drop lines of a metrics file that are behind a step: they will be written again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError:  # cut by the crash
            continue
        if entry.get("event") != "end" and entry.get("step", 0) <= step:
            kept.append(line)
    write_text(path, "".join(f"{line}\n" for line in kept))
