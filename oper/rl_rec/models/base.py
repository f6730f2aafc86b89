"""The interface of all recommenders to training and evaluation, and helpers that they share."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.errors import require
from oper.ranges import Count, Positive, Share, ShareBelowOne, one_of, rules_of

LOSSES = ("softmax", "gbce")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Base class of the models' configurations, the section ``[model]`` of a training run."""

    def __post_init__(self) -> None:
        """Check the fields; raises InvalidInputError."""
        self.check()

    def check(self, *checks: tuple[str, bool, str]) -> None:
        """Raise InvalidInputError for the first field that its type does not allow, or the first
        (field, is right, expected) that is not right."""
        require("invalid training configuration",
                "change it in the section [model], or with --set model.KEY=VALUE",
                *((f"model.{name}", getattr(self, name), is_right, expected)
                  for name, is_right, expected in (*rules_of(self), *checks)))


@dataclass(frozen=True, slots=True)
class SequenceConfig(ModelConfig):
    """Sizes of a model that is trained on subsequences.

    Attributes:
        dim: width D, also of the item rows.
        layers: number of layers of the network.
        steps: T, number of predicted items in a subsequence.
        window: l, number of earlier items that the model sees; the longest history has
            ``steps + window - 1`` items.
        dropout: on the input and inside the network.
        negatives: items drawn per batch, the same for all of its steps; 0 = all items.
        loss: ``"softmax"``: cross-entropy over all items, exact with all of them and estimated
            from log-uniform draws otherwise. ``"gbce"``: generalised binary cross-entropy, with
            uniform draws.
        calibration: t of gBCE, 0..1; 0 is plain binary cross-entropy.
    """

    dim: Positive = 64
    layers: Positive = 2
    steps: Positive = 30
    window: Count = 20
    dropout: ShareBelowOne = 0.1
    negatives: Count = 1024
    loss: Annotated[str, one_of(*LOSSES)] = "softmax"
    calibration: Share = 0.75


@dataclass(frozen=True, slots=True, eq=False)
class Histories:
    """Interactions of a batch of users, oldest first, one user after another.

    Attributes:
        users: int64 [B].
        items: int64 [L], ids >= 1.
        rewards: float32 [L].
        lengths: int64 [B], interactions of each user; they sum to L and may be 0.
        times: int64 [L], seconds of the interactions; None if they are unknown.
    """

    users: torch.Tensor
    items: torch.Tensor
    rewards: torch.Tensor
    lengths: torch.Tensor
    times: torch.Tensor | None = field(default=None, kw_only=True)

    @property
    def num_users(self) -> int:
        """Users `B`."""
        return self.users.numel()


@dataclass(frozen=True, slots=True, eq=False)
class Sequences(Histories):
    """Subsequences of trajectories to train on.

    Attributes:
        skip: int64 [B], number of interactions at the beginning of each subsequence that are only
            context for the state windows of the later ones. The later ones are the steps.
        returns: float32 [L], return-to-go ``g_t = r_t + gamma g_{t+1}`` to the end of the user's
            training interactions.
    """

    skip: torch.Tensor
    returns: torch.Tensor

    @property
    def is_step(self) -> torch.Tensor:
        """Which interactions are steps, bool [L]."""
        first = torch.cumsum(self.lengths, 0) - self.lengths + self.skip
        at = torch.arange(self.items.numel(), device=self.items.device)
        return at >= torch.repeat_interleave(first, self.lengths)


class Recommender(nn.Module):
    """Base class of the models. Those with nothing to train have no `forward` and no `lookups`.

    Item, user and concept rows live in ``EmbeddingCollection`` or ``EmbeddingBagCollection``
    attributes and are looked up, never taken whole, so that they may be sharded.
    """

    def forward(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss float32 [], a mean over the batch, and its named parts for the log."""
        raise NotImplementedError

    def lookups(self, batch: Any) -> list[Any]:
        """The KJTs that `forward` looks up for a training batch, one per collection.

        Access statistics are counted from them.
        """
        raise NotImplementedError

    def encode(self, histories: Histories) -> Any:
        """The users in the form that `scores` takes, e.g. float32 [B, D]."""
        raise NotImplementedError

    def scores(self, encoded: Any, items: torch.Tensor) -> torch.Tensor:
        """Scores float32 [B, n] of candidate items int64 [n], higher = better."""
        raise NotImplementedError

    def schedule(self, step: int, num_steps: int) -> None:
        """Called before training step `step` (from 0) of `num_steps`; for annealed weights.

        A run that continues after a crash may call it again for its first step: any state must be
        in the ``state_dict`` and must not change twice.
        """


def item_table(tables: Mapping[str, Sequence[str]], num_items: int, dim: int, device: str,
               std: float | None = None) -> EmbeddingCollection:
    """Unpooled tables of items.

    Args:
        tables: the features of each table.
        num_items: rows of each, row 0 (padding, never looked up) included.
        dim: columns.
        device: ``"cpu"``, or ``"meta"`` for tables that `oper.shard` fills shard by shard.
        std: standard deviation of the initial weights; by default 1 over the square root of `dim`.
    """
    return EmbeddingCollection(device=torch.device(device), tables=[
        EmbeddingConfig(name=name, num_embeddings=num_items, embedding_dim=dim,
                        feature_names=list(features),
                        init_fn=functools.partial(nn.init.normal_, std=std or dim ** -0.5))
        for name, features in tables.items()])


def one_bag(key: str, ids: torch.Tensor, batch_size: int) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Key, ids and lengths of a feature whose ids int64 [n] belong to the whole batch: all are in
    the first of its bags."""
    lengths = ids.new_zeros(batch_size)
    lengths[:1] = ids.numel()
    return key, ids, lengths


def make_kjt(*features: tuple[str, torch.Tensor, torch.Tensor]) -> KeyedJaggedTensor:
    """A KJT from (key, ids int64 [L_k], lengths int64 [B]) of each feature."""
    keys, ids, lengths = zip(*features, strict=True)
    return KeyedJaggedTensor(list(keys), torch.cat(ids), lengths=torch.cat(lengths),
                             stride=lengths[0].numel())


def look_up(tables: EmbeddingCollection, features: Sequence[str], feature: str, ids: torch.Tensor
            ) -> torch.Tensor:
    """Rows float32 [n, D] of ids int64 [n], looked up as one of a collection's features."""
    none = ids.new_zeros(0)
    found = tables(make_kjt(*(one_bag(key, ids if key == feature else none, 1)
                              for key in features)))
    rows: torch.Tensor = found[feature].values()
    return rows


def last(histories: Histories, count: int) -> Histories:
    """The last `count` interactions of each user."""
    ends = torch.cumsum(histories.lengths, 0)
    left = torch.repeat_interleave(ends, histories.lengths) - torch.arange(
        histories.items.numel(), device=ends.device)
    kept = left <= count
    return Histories(histories.users, histories.items[kept], histories.rewards[kept],
                     histories.lengths.clamp(max=count),
                     times=None if histories.times is None else histories.times[kept])


def padded(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Rows [L, ...] of B sequences as [B, max length, ...], zeros on the right."""
    longest = int(lengths.max()) if lengths.numel() else 0
    out = rows.new_zeros(lengths.numel(), longest, *rows.shape[1:])
    kept = _inside(lengths, longest)
    return out.masked_scatter(kept.view(*kept.shape, *(1,) * (rows.ndim - 1)), rows)


def unpadded(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Rows [L, ...] of B sequences that are padded to [B, P, ...], P >= max length."""
    return rows[_inside(lengths, rows.shape[1])]


def _inside(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


class NegativeSampler:
    """Draws items that represent the whole catalogue in a loss.

    Args:
        num_items: rows of the item table, row 0 (padding) included.
        count: items per draw, with repetition; 0 = every item once.
        uniform: draw uniformly. Otherwise log-uniformly: ids are in order of popularity, so ``P(i)
            = log((i + 1) / i) / log(num_items)``, i >= 1, is close to Zipf's law and needs no table
            of counts (the candidate sampler of TensorFlow's sampled softmax).
    """

    def __init__(self, num_items: int, count: int, uniform: bool = False) -> None:
        self.num_items, self.count, self.uniform = num_items, count, uniform
        self._log_range = math.log(num_items)

    def draw(self, device: torch.device) -> torch.Tensor:
        """Ids int64 [n] on a device, by torch's generator."""
        if not self.count:
            return torch.arange(1, self.num_items, device=device)
        if self.uniform:
            return torch.randint(1, self.num_items, (self.count,), device=device)
        u = torch.rand(self.count, dtype=torch.float64, device=device)
        return torch.exp(u * self._log_range).long().clamp(1, self.num_items - 1)

    def log_expected(self, ids: torch.Tensor) -> torch.Tensor:
        """Log of the expected number of times that each id is in a draw, float32."""
        if not self.count:
            return torch.zeros(ids.shape, device=ids.device)
        if self.uniform:
            return torch.full(ids.shape, math.log(self.count / (self.num_items - 1)),
                              device=ids.device)
        return torch.log(self.count * torch.log1p(1 / ids.double()) / self._log_range).float()

    def loss(self, kind: str, calibration: float, *parts: torch.Tensor) -> torch.Tensor:
        """The loss named by `kind`, one of `LOSSES`; float32 [N]. `parts` are the arguments of
        `softmax_loss`, `calibration` that of `gbce_loss`."""
        if kind == "softmax":
            return self.softmax_loss(*parts)
        queries, targets, target_rows, drawn, drawn_rows = parts
        return self.gbce_loss(queries, targets, target_rows, drawn, drawn_rows, calibration)

    def softmax_loss(self, queries: torch.Tensor, targets: torch.Tensor, target_rows: torch.Tensor,
                     drawn: torch.Tensor, drawn_rows: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of a softmax over all items, float32 [N].

        ``-s(y) + log(exp s(y) + sum_{j != y} exp(s(j) - log E_j))`` over the drawn j, with ``s(i) =
        <q, row_i>`` and ``E_j`` as `log_expected`: the sum over the other items is unbiased
        (importance sampling, Bengio and Senecal 2008; the logQ correction). The target is always
        included and needs no correction. With every item once the loss is exact.

        Args:
            queries: float32 [N, D].
            targets: int64 [N].
            target_rows: float32 [N, D].
            drawn: int64 [n].
            drawn_rows: float32 [n, D].
        """
        wanted = (queries * target_rows).sum(dim=1, keepdim=True)
        others = queries @ drawn_rows.T - self.log_expected(drawn)
        others = others.masked_fill(targets[:, None] == drawn[None, :], float("-inf"))
        return torch.logsumexp(torch.cat([wanted, others], dim=1), dim=1) - wanted[:, 0]

    def gbce_loss(self, queries: torch.Tensor, targets: torch.Tensor, target_rows: torch.Tensor,
                  drawn: torch.Tensor, drawn_rows: torch.Tensor, calibration: float
                  ) -> torch.Tensor:
        """Generalised binary cross-entropy (Petrov and Macdonald, RecSys 2023), float32 [N].

        ``-(beta log sigma(s(y)) + sum_{j != y} log(1 - sigma(s(j)))) / (n + 1)`` over n drawn j.
        Fewer negatives than items make a plain binary loss overconfident; with
        ``alpha = n / (items - 1)`` and calibration t, ``beta = alpha (t (1 - 1 / alpha) +
        1 / alpha)`` takes that back wholly at t = 1 and not at all (plain BCE) at t = 0. The
        correction holds for uniform draws.

        Args: those of `softmax_loss`, and
            calibration: t, 0..1.
        """
        alpha = min(1.0, drawn.numel() / max(1, self.num_items - 2))
        beta = alpha * (calibration * (1 - 1 / alpha) + 1 / alpha)
        wanted = (queries * target_rows).sum(dim=1)
        others = nn.functional.softplus(queries @ drawn_rows.T)
        others = others.masked_fill(targets[:, None] == drawn[None, :], 0.0)
        found = others.sum(dim=1) - beta * nn.functional.logsigmoid(wanted)
        return found / (drawn.numel() + 1)
