"""A training run whose weights are served while it trains; scores show which step they are of."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.integration.checkpoint.deltas import DeltaCheckpoints
from oper.serve import PublishedModel, Request, Signature
from oper.shmem.publication.publisher import Prepared, Publisher
from oper.train.resume import CHECKPOINT
from oper.train.trained import find_weights
from tests.world_support import report

ROWS, DIM, TOUCHED = 640, 4, 8
DIE_AT = "OPER_TEST_DIE_AT"  # the copy of changed rows at which the supervisor is killed
_SLOPE = 0.01
# Two samples: one with all rows of both tables, one without any.
REQUEST = Request(np.zeros((2, 1), np.float32), np.array([[ROWS, 0], [ROWS, 0]], np.int32),
                  np.tile(np.arange(ROWS, dtype=np.int64), 2))


class Model(nn.Module):
    """Each step adds 1 to `TOUCHED` rows of each table and to the parameter ``step``.

    The logit is the sum of all rows of a bag, in units of steps, minus ``step``: small integers,
    which float32 represents exactly. With all rows it is 0 for every step, unless the rows or the
    parameter are of different steps.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection([EmbeddingBagConfig(
            name=f"t{f}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f])
            for f in "ab"], device=torch.device(device))
        self.step = nn.Parameter(torch.zeros(1, device=device))
        if device != "meta":
            for value in self.bags.parameters():
                nn.init.zeros_(value)

    def forward(self, dense: torch.Tensor, kjt: KeyedJaggedTensor) -> torch.Tensor:
        steps = self.bags(kjt).values().sum(1) / (2 * DIM * TOUCHED)
        return (steps - self.step) * _SLOPE


def step_of(scores: np.ndarray) -> int:
    """Return the step whose weights gave the scores of `REQUEST`; -1 if they are of several steps.
    """
    step = -np.log(scores[1] / (1 - scores[1].astype(np.float64))) / _SLOPE
    return round(step) if scores[0] == 0.5 and abs(step - round(step)) < 0.01 else -1


def train(rank: int, world_size: int, folder: str, steps: int, full_every: int) -> int:
    """Continue the run in `folder` up to step `steps`, and save after each step."""
    model: Any = oper.shard(Model(), optimizer=oper.SGD(lr=1.0))
    place = Path(folder) / CHECKPOINT
    with DeltaCheckpoints(place, model) as saver:
        done = saver.load().step if place.exists() else 0
        if not done:
            saver.save_full(0, {"step": 0})
        report(done)
        for step in range(done + 1, steps + 1):
            make_step(model, step)
            if step % full_every == 0:
                saver.save_full(step, {"step": step})
            else:
                saver.save(step)
            time.sleep(0.01)
    return steps


def make_step(model: Any, step: int) -> None:
    first = (step * 7 * TOUCHED) % (ROWS - TOUCHED)
    ids = torch.arange(first, first + TOUCHED).repeat(2)
    kjt = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([TOUCHED] * 2))
    (-model.bags(kjt).values().sum()).backward()
    with torch.no_grad():
        model.step += 1


def save_chains(folder: Path, count: int, deltas: int) -> None:
    """Save `count` checkpoints with `deltas` deltas each, in ``folder/0``, ``folder/1``, ..."""
    model: Any = oper.shard(Model(), optimizer=oper.SGD(lr=1.0))
    step = 0
    with DeltaCheckpoints(folder / "run" / CHECKPOINT, model) as saver:
        for k in range(count):
            saver.save_full(step, {"step": step})
            for _ in range(deltas):
                step += 1
                make_step(model, step)
                saver.save(step)
            saver.flush()
            shutil.copytree(folder / "run", folder / str(k))


def make() -> PublishedModel:
    """Return the newest weights of the run in the folder named by the environment, for ``oper
    serve``."""
    if os.environ.get(DIE_AT):
        _die_at(int(os.environ[DIE_AT]))
    return PublishedModel(Model, find_weights(os.environ["OPER_TEST_RUN"]),
                          Signature("run", ("a", "b"), (ROWS, ROWS), 1))


def _die_at(count: int) -> None:
    """Kill this process in the middle of copying a delta, between two of its tables."""
    commit, calls = Publisher.commit, iter(range(1, 1 << 30))

    def committed(self: Publisher, prepared: Prepared, timeout_s: float = 1.0) -> int:
        operators: Any = torch.ops.oper
        place = operators.place_rows

        def counted(*places: list[torch.Tensor]) -> None:
            for one in zip(*places, strict=True):
                place(*([part] for part in one))
                if next(calls) == count:
                    os.kill(os.getpid(), signal.SIGKILL)

        operators.place_rows = counted
        try:
            return commit(self, prepared, timeout_s)
        finally:
            operators.place_rows = place

    Publisher.commit = committed  # type: ignore[method-assign]
