"""Number of OPER's Python calls per batch, in forward and backward pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import oper
from tests.support import frames_of

MOST_FRAMES, MOST_FILES = 5, 3
FIGURE = Path(__file__).resolve().parents[2] / "docs/assets/calls.svg"


def bags() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """A collection of three tables, and its input."""
    names = ["a", "b", "c"]
    collection = EmbeddingBagCollection(tables=[
        EmbeddingBagConfig(name=f"table_{name}", num_embeddings=20, embedding_dim=8,
                           feature_names=[name]) for name in names])
    features = KeyedJaggedTensor.from_lengths_sync(
        names, torch.arange(24) % 20, torch.full((12,), 2))
    return collection, (features,)


def bag() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """One module of torch, and its input."""
    return torch.nn.EmbeddingBag(20, 8, mode="sum"), (torch.arange(8).view(4, 2),)


@pytest.mark.parametrize("make", [bags, bag])
def test_number_of_python_calls_per_step(make: Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]]
                                         ) -> None:
    module, inputs = make()
    model = oper.shard(torch.nn.Sequential(module), optimizer=oper.RowWiseAdagrad(lr=0.1))

    def values(out: Any) -> torch.Tensor:
        return out if isinstance(out, torch.Tensor) else out.values()

    for _ in range(2):  # what is known after the first batches
        out = values(model(*inputs))
        out.backward(torch.ones_like(out))
    with torch.no_grad():
        _, read = frames_of(lambda: model(*inputs))
    out, forward = frames_of(lambda: values(model(*inputs)))
    gradient = torch.ones_like(out)
    before = model[0].tables.num_steps
    _, backward = frames_of(lambda: out.backward(gradient))
    assert model[0].tables.num_steps == before + 1
    for name, seen in (("read", read), ("forward", forward), ("backward", backward)):
        assert 0 < len(seen) <= MOST_FRAMES, (name, seen)
        assert len({file for file, _ in seen}) <= MOST_FILES, (name, seen)
    if make is bags:
        calls = [*forward, *backward]
        for (file, function), (shown_file, shown) in zip(calls, figure(), strict=True):
            assert Path(file).name == shown_file and function.endswith(shown), (function, shown)


def figure() -> list[tuple[str, str]]:
    """(file, function) of each call that the figure of a training step shows, in order."""
    texts = re.findall(r'<text x="(\d+)" y="(\d+)"[^>]*>([^<]+)</text>', FIGURE.read_text())
    files = {(int(x) > 350, y): text for x, y, text in texts if text.endswith(".py")}
    names = {(int(x) > 350, y): text for x, y, text in texts if not text.endswith(".py")}
    return [(file, names[at]) for at, file in files.items()]
