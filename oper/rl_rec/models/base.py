"""Interface of recommenders to training and evaluation, and shared helpers."""

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
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from oper.errors import require
from oper.ranges import Count, Positive, Share, ShareBelowOne, one_of, rules_of

LOSSES = ("softmax", "gbce")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Base class of models' configurations, which ``[model]`` of a training configuration sets."""

    def __post_init__(self) -> None:
        self.check()

    def check(self, *checks: tuple[str, bool, str]) -> None:
        """Raise InvalidInputError for the first field outside of its annotated range, or the first
        of `checks` (field, is valid, expected) that is not valid."""
        require("invalid training configuration",
                "change it in the section [model], or with --set model.KEY=VALUE",
                *((f"model.{name}", getattr(self, name), is_right, expected)
                  for name, is_right, expected in (*rules_of(self), *checks)))


@dataclass(frozen=True, slots=True)
class SequenceConfig(ModelConfig):
    """Configuration of a model that is trained on subsequences.

    Attributes:
        dim: D, width of the network and of the item rows.
        layers: number of layers of the network.
        steps: T, maximum number of predicted items in a training subsequence.
        window: l, number of preceding items given as context; the longest history that a model uses
            has ``steps + window - 1`` items.
        dropout: dropout probability on the input and inside the network.
        negatives: items drawn per batch, shared by all of its steps; 0 = all items.
        loss: ``"softmax"``: cross-entropy over all items, exact if `negatives` is 0 and otherwise
            estimated from log-uniform draws. ``"gbce"``: generalised binary cross-entropy with
            uniform draws.
        calibration: t of gBCE, in [0, 1]; 0 = plain binary cross-entropy.
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
    """Interactions of B users, concatenated user by user, oldest first.

    Attributes:
        users: ids of the users, int64 [B].
        items: ids of the items, int64 [L], >= 1.
        rewards: float32 [L].
        lengths: number of interactions of each user, int64 [B], >= 0; they sum to L.
        times: int64 [L], seconds since 1970; None if unknown.
        actions: ids of the kinds of interactions, int64 [L], 0 = missing; None if unknown.
    """

    users: torch.Tensor
    items: torch.Tensor
    rewards: torch.Tensor
    lengths: torch.Tensor
    times: torch.Tensor | None = field(default=None, kw_only=True)
    actions: torch.Tensor | None = field(default=None, kw_only=True)

    @property
    def num_users(self) -> int:
        return self.users.numel()


@dataclass(frozen=True, slots=True, eq=False)
class Sequences(Histories):
    """Training subsequences: leading context interactions, then the steps to learn from.

    Attributes:
        skip: number of context interactions of each subsequence, int64 [B].
        returns: return-to-go ``g_t = r_t + gamma g_{t+1}`` of each interaction, up to the end of
            the user's training interactions, float32 [L].
    """

    skip: torch.Tensor
    returns: torch.Tensor

    @property
    def is_step(self) -> torch.Tensor:
        """Mask of the interactions that are steps, not context; bool [L]."""
        first = torch.cumsum(self.lengths, 0) - self.lengths + self.skip
        at = torch.arange(self.items.numel(), device=self.items.device)
        return at >= torch.repeat_interleave(first, self.lengths)


class Recommender(nn.Module):
    """Base class of the models; models without training need no `forward` and no `lookups`.

    Tables are ``EmbeddingCollection`` or ``EmbeddingBagCollection`` attributes whose rows are only
    looked up by id, so that tables can be sharded.
    """

    def forward(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the batch's mean loss, float32 [], and its detached terms by name, for logging."""
        raise NotImplementedError

    def lookups(self, batch: Any) -> list[Any]:
        """Return the KJTs that `forward` looks up for a batch, one per collection, for access
        statistics."""
        raise NotImplementedError

    def encode(self, histories: Histories) -> Any:
        """Encode B users for `scores`, for example as float32 [B, D]."""
        raise NotImplementedError

    def scores(self, encoded: Any, items: torch.Tensor) -> torch.Tensor:
        """Score candidate items int64 [n] for each user, float32 [B, n]; higher = better."""
        raise NotImplementedError

    def warm_up(self, num_steps: int) -> int:
        """Return how many of the first of `num_steps` training steps have another loss than the
        configured one, apart from annealed weights of KL terms. Early stopping selects no weights
        before the next step."""
        return 0

    def schedule(self, step: int, num_steps: int) -> None:
        """Hook before training step `step` (from 0) of `num_steps`, for annealed weights.

        A resumed run may repeat the call for its first step: state must be in the ``state_dict``
        and must not change again.
        """


def third_of(num_steps: int) -> int:
    """Return a third of a number of steps, rounded up."""
    return -(-num_steps // 3)


def item_table(tables: Mapping[str, Sequence[str]], num_items: int, dim: int, device: str,
               std: float | None = None, others: Mapping[str, int] = {}) -> EmbeddingCollection:
    """Make an ``EmbeddingCollection`` of item tables.

    Args:
        tables: names of the features of each table.
        num_items: rows of each table, row 0 (padding, never looked up) included.
        dim: columns.
        device: ``"cpu"``, or ``"meta"`` for tables that `oper.shard` initialises shard by shard.
        std: standard deviation of the initial weights; None = ``dim ** -0.5``.
        others: rows of the tables that have other rows than items, by name.
    """
    return EmbeddingCollection(device=torch.device(device), tables=[
        EmbeddingConfig(name=name, num_embeddings=others.get(name, num_items), embedding_dim=dim,
                        feature_names=list(features),
                        init_fn=functools.partial(nn.init.normal_, std=std or dim ** -0.5))
        for name, features in tables.items()])


def one_bag(key: str, ids: torch.Tensor, batch_size: int) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return key, ids int64 [n] and lengths of a feature whose ids are all in its first bag."""
    lengths = ids.new_zeros(batch_size)
    lengths[:1] = ids.numel()
    return key, ids, lengths


def make_kjt(*features: tuple[str, torch.Tensor, torch.Tensor]) -> KeyedJaggedTensor:
    """Make a KJT from (key, ids int64 [L_k], lengths int64 [B]) of each feature."""
    keys, ids, lengths = zip(*features, strict=True)
    return KeyedJaggedTensor(list(keys), torch.cat(ids), lengths=torch.cat(lengths),
                             stride=lengths[0].numel())


def look_up(tables: EmbeddingCollection, features: Sequence[str], ids: Mapping[str, torch.Tensor]
            ) -> dict[str, JaggedTensor]:
    """Look up ids int64 [n] by feature; the other ones of the collection's `features` get no ids.

    The values of each feature's result are float32 [n, D].
    """
    none = next(iter(ids.values())).new_zeros(0)
    found: dict[str, JaggedTensor] = tables(make_kjt(*(one_bag(key, ids.get(key, none), 1)
                                                       for key in features)))
    return found


def last(histories: Histories, count: int) -> Histories:
    """Keep the last `count` interactions of each user."""
    ends = torch.cumsum(histories.lengths, 0)
    left = torch.repeat_interleave(ends, histories.lengths) - torch.arange(
        histories.items.numel(), device=ends.device)
    kept = left <= count
    return Histories(histories.users, histories.items[kept], histories.rewards[kept],
                     histories.lengths.clamp(max=count),
                     times=None if histories.times is None else histories.times[kept],
                     actions=None if histories.actions is None else histories.actions[kept])


def padded(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Pad rows [L, ...] of B sequences with zeros on the right to [B, max length, ...]."""
    longest = int(lengths.max()) if lengths.numel() else 0
    out = rows.new_zeros(lengths.numel(), longest, *rows.shape[1:])
    kept = _inside(lengths, longest)
    return out.masked_scatter(kept.view(*kept.shape, *(1,) * (rows.ndim - 1)), rows)


def unpadded(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Concatenate B sequences padded to [B, P, ...], P >= max length, to rows [L, ...]."""
    return rows[_inside(lengths, rows.shape[1])]


def _inside(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


class NegativeSampler:
    """Draws negative items, and computes sampled losses with them.

    Args:
        num_items: rows of the item table, row 0 (padding) included.
        count: items per draw, with replacement; 0 = every item once.
        uniform: draw uniformly. Otherwise ``P(i) = log((i + 1) / i) / log(num_items)``, i >= 1,
            which is close to Zipf's law since ids are in order of popularity (TensorFlow's
            log-uniform candidate sampler).
    """

    def __init__(self, num_items: int, count: int, uniform: bool = False) -> None:
        self.num_items, self.count, self.uniform = num_items, count, uniform
        self._log_range = math.log(num_items)

    def draw(self, device: torch.device) -> torch.Tensor:
        """Draw ids int64 [n] on a device with torch's global generator."""
        if not self.count:
            return torch.arange(1, self.num_items, device=device)
        if self.uniform:
            return torch.randint(1, self.num_items, (self.count,), device=device)
        u = torch.rand(self.count, dtype=torch.float64, device=device)
        return torch.exp(u * self._log_range).long().clamp(1, self.num_items - 1)

    def log_expected(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the log of the expected number of occurrences of each id in a draw, float32."""
        if not self.count:
            return torch.zeros(ids.shape, device=ids.device)
        if self.uniform:
            return torch.full(ids.shape, math.log(self.count / (self.num_items - 1)),
                              device=ids.device)
        return torch.log(self.count * torch.log1p(1 / ids.double()) / self._log_range).float()

    def loss(self, config: SequenceConfig, *parts: torch.Tensor) -> torch.Tensor:
        """Compute the loss that `config` chooses, float32 [N]; `parts` are the arguments of
        `softmax_loss`."""
        return (self.softmax_loss(*parts) if config.loss == "softmax"
                else self.gbce_loss(*parts, calibration=config.calibration))

    def softmax_loss(self, queries: torch.Tensor, targets: torch.Tensor, target_rows: torch.Tensor,
                     drawn: torch.Tensor, drawn_rows: torch.Tensor) -> torch.Tensor:
        """Compute the cross-entropy of each prediction against its item, float32 [N].

        With the score ``s(i) = <query, row of item i>``, the loss of a prediction with item ``y``
        is::

            log(exp(s(y)) + sum over drawn j != y of exp(s(j) - log_expected(j))) - s(y)

        With ``count = 0``, all items are drawn and ``log_expected`` is 0: the loss is the
        cross-entropy of the softmax over all items. Otherwise, the sum is an unbiased estimate of
        the sum of ``exp(s(j))`` over all items other than ``y`` (importance sampling, Bengio and
        Senecal 2008; also known as logQ correction).

        Args:
            queries: vector of each prediction, float32 [N, D].
            targets: id of the item ``y`` of each prediction, int64 [N].
            target_rows: embedding row of each ``y``, float32 [N, D].
            drawn: ids from `draw`, the same for all predictions, int64 [n].
            drawn_rows: embedding row of each drawn id, float32 [n, D].
        """
        wanted = (queries * target_rows).sum(dim=1, keepdim=True)
        others = queries @ drawn_rows.T - self.log_expected(drawn)
        others = others.masked_fill(targets[:, None] == drawn[None, :], float("-inf"))
        return torch.logsumexp(torch.cat([wanted, others], dim=1), dim=1) - wanted[:, 0]

    def gbce_loss(self, queries: torch.Tensor, targets: torch.Tensor, target_rows: torch.Tensor,
                  drawn: torch.Tensor, drawn_rows: torch.Tensor, *, calibration: float
                  ) -> torch.Tensor:
        """Compute generalised binary cross-entropy (Petrov and Macdonald, RecSys 2023), [N].

        ``-(beta log sigma(s(y)) + sum_{j != y} log(1 - sigma(s(j)))) / (n + 1)`` over n drawn j,
        with ``beta = alpha (t (1 - 1 / alpha) + 1 / alpha)`` and ``alpha = n / (items - 1)``.
        Sampling fewer negatives than items makes plain BCE (t = 0) overconfident; t = 1 corrects
        this completely, for uniform draws.

        Args: those of `softmax_loss`, and
            calibration: t, in [0, 1].
        """
        alpha = min(1.0, drawn.numel() / max(1, self.num_items - 2))
        beta = alpha * (calibration * (1 - 1 / alpha) + 1 / alpha)
        wanted = (queries * target_rows).sum(dim=1)
        others = nn.functional.softplus(queries @ drawn_rows.T)
        others = others.masked_fill(targets[:, None] == drawn[None, :], 0.0)
        found = others.sum(dim=1) - beta * nn.functional.logsigmoid(wanted)
        return found / (drawn.numel() + 1)
