"""CDT4Rec: a causal decision transformer for recommendation, and its ablations.

Re-implementation from the abstract of Wang, Chen, Jannach and Yao (SIGIR 2023, arXiv 2304.07920)
and related public work: the Decision Transformer (Chen et al. 2021) and the Causal Transformer
(Melnychuk et al. 2022). The paper's equations and hyper-parameters were not available; no claim is
made on its numbers.

A user's trajectory of T steps, batch size B, width D:

    history  h_t, by default the mean row E[i] of the last l items before step t (`state`)
    state    e^s_t = W_s [ h_t ; E^U[u] ] + b_s                         [B, T, D]
    action   e^a_t = W_a E[i_t] + b_a                                   [B, T, D]
    outcome  e^o_t = e^a_t + r_t (W_r e^a_t + b_r)                      [B, T, D]
    return   e^g_t = w_g g_t / scale + b_g     g_t = sum_{k>=t} gamma^(k-t) r_k

The backbone adds a time embedding E^T[t] to its inputs and applies LayerNorm and dropout.

Multi-stream backbone (``backbone="causal"``). There are two streams: states S = (e^s_t), and
actions with outcomes A = (e^o_{t-1}), which begins with a learned vector. Each block applies to
each stream masked self-attention, masked cross-attention to the other stream, and a feed-forward
layer, each with residual and LayerNorm. Then

    phi_t = ELU(W_1 mean(s_t, a_t) + b_1)                               [B, T, D]

phi_t does not depend on a_t, r_t or any return-to-go, which only the action head uses. So phi is a
representation of the history on which the reward of *any* action can be regressed:

    action head  q_t = phi_t + MLP [ phi_t ; e^g_t ]
                 score_t(i) = <q_t, E^O[i]>,  E^O = E or its own table
    reward head  r^_t(a) = w_2' ELU(W_4 [ phi_t ; e^a ] + b_4)

Interleaved backbone (``backbone="interleaved"``, an ablation): tokens g_1, s_1, a_1, g_2, ... in
one causal pre-LN transformer; phi_t is the output at s_t. Here phi_t depends on g_t, which contains
r_t, so the reward head is not an outcome model. ``reward_weight=0`` gives the Decision Transformer.

Loss over the steps: mean CE(score_t, i_t) + reward_weight * mean BCE or (r^_t(i_t) - r_t)^2; the
first term may be gBCE instead. Item rows are only looked up by id; the normaliser of the
cross-entropy is estimated from drawn items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from oper.ranges import Amount, Count, Positive, PositiveShare, Share, one_of
from oper.rl_rec.models.base import (
    Histories,
    NegativeSampler,
    Recommender,
    SequenceConfig,
    Sequences,
    item_table,
    last,
    look_up,
    make_kjt,
    one_bag,
    padded,
    third_of,
)
from oper.rl_rec.models.state import STATES, ItemState
from oper.rl_rec.models.transformer import Attention, Block, feed_forward

BACKBONES = ("causal", "interleaved")
Backbone = Annotated[str, one_of(*BACKBONES)]
RETURNS = ("logged", "none", "estimated")


@dataclass(frozen=True, slots=True)
class CDT4RecConfig(SequenceConfig):
    """Configuration of CDT4Rec.

    Attributes:
        user_dim: columns of the user table; 0 = no user table.
        heads: attention heads of the backbone.
        state: summary h_t of earlier items. ``"mean"``: mean row of the last `window` items;
            ``"last"``: row of the last item; ``"gru"``, ``"transformer"``: output of such a layer.
        backbone: ``"causal"`` (multi-stream) or ``"interleaved"``.
        tied: whether the input table is also the output table, E^O = E.
        reward_weight: weight of the reward loss; 0 = the reward head is not trained.
        reward_loss: ``"bce"`` (rewards in [0, 1]) or ``"mse"``.
        returns: returns-to-go in training. ``"logged"``: as logged; ``"none"``: replaced by 0;
            ``"estimated"``: after the first third of training, logged rewards in them are replaced
            by the reward head's estimates, without gradient.
        gamma: discount of returns-to-go. With a long horizon, a return almost identifies its logged
            trajectory, so that the action head memorises the log.
        target_quantile: quantile of the training returns that is the return-to-go in inference;
            that of the logged ones also with ``returns="estimated"``, which vary less.
    """

    window: Positive = 20
    user_dim: Count = 0
    heads: Positive = 2
    state: Annotated[str, one_of(*STATES)] = "mean"
    backbone: Backbone = "causal"
    tied: bool = True
    reward_weight: Amount = 1.0
    reward_loss: Annotated[str, one_of("bce", "mse")] = "bce"
    returns: Annotated[str, one_of(*RETURNS)] = "logged"
    gamma: PositiveShare = 0.3
    target_quantile: Share = 0.9

    def __post_init__(self) -> None:
        self.check(("heads", self.dim % max(self.heads, 1) == 0, f"a divisor of dim={self.dim}"),
                   ("returns", self.returns != "estimated" or (
                       self.backbone == "causal" and self.reward_weight > 0),
                    "estimated only with the causal backbone and reward_weight > 0"))


@dataclass(frozen=True, slots=True)
class DecisionTransformerConfig(CDT4RecConfig):
    """The Decision Transformer baseline: interleaved tokens and no reward loss."""

    backbone: Backbone = "interleaved"
    reward_weight: Amount = 0.0


# ---- backbones and heads -------------------------------------------------------------------------


class MultiStreamBlock(nn.Module):
    """A block of `MultiStream`: self-attention, cross-attention and feed-forward of two streams."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()

        def norms() -> nn.ModuleList:
            return nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))

        self.own = nn.ModuleList(Attention(dim, heads, dropout) for _ in range(2))
        self.cross = nn.ModuleList(Attention(dim, heads, dropout) for _ in range(2))
        self.feed_forwards = nn.ModuleList(feed_forward(dim, dropout) for _ in range(2))
        self.norms_1, self.norms_2, self.norms_3 = norms(), norms(), norms()

    def forward(self, streams: list[torch.Tensor]) -> list[torch.Tensor]:
        """Transform two streams, float32 [B, T, D] each."""
        alone = [norm(x + attend(x, x))
                 for x, attend, norm in zip(streams, self.own, self.norms_1, strict=True)]
        joint = [norm(x + attend(x, other)) for x, other, attend, norm in zip(
            alone, reversed(alone), self.cross, self.norms_2, strict=True)]
        return [norm(x + layer(x))
                for x, layer, norm in zip(joint, self.feed_forwards, self.norms_3, strict=True)]


class MultiStream(nn.Module):
    """The default backbone: computes phi_t from states up to t and actions and rewards before t."""

    def __init__(self, config: CDT4RecConfig) -> None:
        super().__init__()
        dim = config.dim
        self.reward = nn.Linear(dim, dim)
        self.start = nn.Parameter(torch.zeros(dim))  # first token of the action stream
        self.time = nn.Parameter(0.02 * torch.randn(config.steps, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            MultiStreamBlock(dim, config.heads, config.dropout) for _ in range(config.layers))
        self.merge = nn.Linear(dim, dim)

    def forward(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor,
                returns: torch.Tensor) -> torch.Tensor:
        """Compute phi from e^s, e^a, float32 [B, T, D], and rewards [B, T]; ignores returns."""
        outcomes = actions + rewards.unsqueeze(-1) * self.reward(actions)
        start = self.start.expand(states.shape[0], 1, -1)
        streams = [states, torch.cat([start, outcomes[:, :-1]], dim=1)]
        time = self.time[:states.shape[1]]
        streams = [self.dropout(norm(x + time))
                   for x, norm in zip(streams, self.norms, strict=True)]
        for block in self.blocks:
            streams = block(streams)
        return F.elu(self.merge(torch.stack(streams).mean(dim=0)))


class Interleaved(nn.Module):
    """The Decision Transformer's backbone over (g_1, s_1, a_1, g_2, ...); phi_t is read at s_t."""

    def __init__(self, config: CDT4RecConfig) -> None:
        super().__init__()
        dim = config.dim
        self.returns = nn.Linear(1, dim)
        self.time = nn.Parameter(0.02 * torch.randn(config.steps, dim))
        self.norm, self.last_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(dim, config.heads, config.dropout) for _ in range(config.layers))

    def forward(self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor,
                returns: torch.Tensor) -> torch.Tensor:
        """Compute phi, float32 [B, T, D], from e^s, e^a [B, T, D], scaled returns-to-go [B, T].

        Rewards are ignored, since returns-to-go determine them.
        """
        tokens = torch.stack([self.returns(returns.unsqueeze(-1)), states, actions], dim=2)
        tokens = tokens + self.time[:states.shape[1], None]
        x = self.dropout(self.norm(tokens.flatten(1, 2)))  # [B, 3 T, D]
        for block in self.blocks:
            x = block(x)
        return self.last_norm(x[:, 1::3])


class Heads(nn.Module):
    """Heads that compute the action query q_t and the reward estimate r^_t(a)."""

    def __init__(self, config: CDT4RecConfig) -> None:
        super().__init__()
        dim = config.dim
        # With the interleaved backbone, phi already depends on the return.
        self.returns = nn.Linear(1, dim) if config.backbone == "causal" else None
        inner = 2 * dim if self.returns is not None else dim
        self.action = nn.Sequential(nn.Linear(inner, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.w_4, self.w_2 = nn.Linear(2 * dim, dim), nn.Linear(dim, 1)

    def queries(self, phi: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        """Compute q, float32 [..., D], from phi [..., D] and scaled returns-to-go [...]."""
        seen = [phi] if self.returns is None else [phi, self.returns(returns.unsqueeze(-1))]
        return phi + self.action(torch.cat(seen, dim=-1))

    def rewards(self, phi: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Compute r^, float32 [...] (a logit for ``"bce"``), from phi and e^a, both [..., D]."""
        hidden = F.elu(self.w_4(torch.cat([phi, actions], dim=-1)))
        return self.w_2(hidden).squeeze(-1)


def make_backbone(config: CDT4RecConfig) -> nn.Module:
    return (MultiStream if config.backbone == "causal" else Interleaved)(config)


def reward_loss(config: CDT4RecConfig, estimates: torch.Tensor, rewards: torch.Tensor
                ) -> torch.Tensor:
    """Compute the element-wise loss of reward estimates (logits for ``"bce"``)."""
    if config.reward_loss == "bce":
        return F.binary_cross_entropy_with_logits(estimates, rewards, reduction="none")
    return (estimates - rewards).square()


# ---- the model over items ------------------------------------------------------------------------


class Steps(NamedTuple):
    """Input of the backbone: steps of B trajectories, padded on the right to T.

    The causal mask suffices for padding on the right: no real step attends to padding.
    """

    states: torch.Tensor   # e^s  float32 [B, T, D]
    actions: torch.Tensor  # e^a  float32 [B, T, D]
    rows: torch.Tensor     # E[i_t] float32 [B, T, D]
    rewards: torch.Tensor  # float32 [B, T]
    at: torch.Tensor       # int64 [B, T], index of the step in the batch's interactions [L]
    valid: torch.Tensor    # bool [B, T], false for padding


class Encoded(NamedTuple):
    """phi and q of users at the step to recommend for, float32 [B, D] each."""

    phi: torch.Tensor
    queries: torch.Tensor


class CDT4Rec(Recommender):
    """The CDT4Rec model over a catalogue of items; see the module docstring.

    Args:
        config: configuration.
        num_users, num_items: rows of the tables, row 0 (padding) included.
        returns: (scale, target): the divisor of returns-to-go, and the return-to-go in inference.
        device: device of the tables, ``"cpu"`` or ``"meta"``.
    """

    def __init__(self, config: CDT4RecConfig, num_users: int, num_items: int,
                 returns: tuple[float, float], device: str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.negatives = NegativeSampler(num_items, config.negatives, config.loss == "gbce")
        self.scale, self.target = returns
        self.estimate_returns = False
        dim = config.dim
        self.history = ItemState(config.state, dim, config.window, config.steps + config.window,
                                 config.heads, config.dropout)
        self.state = nn.Linear(dim + config.user_dim, dim)
        self.action = nn.Linear(dim, dim)
        self.backbone = make_backbone(config)
        self.heads = Heads(config)
        tables = {"item": ["seen", "drawn"]} if config.tied else {
            "item": ["seen"], "item_out": ["chosen", "drawn"]}
        self.features = [feature for features in tables.values() for feature in features]
        self.items = item_table(tables, num_items, dim, device)
        if config.user_dim:
            self.users = EmbeddingBagCollection(device=torch.device(device), tables=[
                EmbeddingBagConfig(name="user", num_embeddings=num_users, feature_names=["user"],
                                   embedding_dim=config.user_dim)])

    def warm_up(self, num_steps: int) -> int:
        """Return the number of initial steps that train on logged returns: with
        ``returns="estimated"`` a third of the steps, otherwise 0."""
        return third_of(num_steps) if self.config.returns == "estimated" else 0

    def schedule(self, step: int, num_steps: int) -> None:
        """With ``returns="estimated"``, use estimated returns after the first third of training."""
        self.estimate_returns = (self.config.returns == "estimated"
                                 and step >= self.warm_up(num_steps))

    def lookups(self, batch: Histories) -> list[KeyedJaggedTensor]:
        """Make KJTs of the batch's items with new negatives and, with a user table, its users."""
        return self._kjts(batch, self.negatives.draw(batch.items.device))

    def _kjts(self, batch: Histories, drawn: torch.Tensor) -> list[KeyedJaggedTensor]:
        features = [("seen", batch.items, batch.lengths),
                    one_bag("drawn", drawn, batch.num_users)]
        if not self.config.tied:
            features.append(("chosen", batch.items, batch.lengths))
        found = [make_kjt(*features)]
        if self.config.user_dim:
            found.append(make_kjt(("user", batch.users, torch.ones_like(batch.users))))
        return found

    # ---- training ----

    def forward(self, batch: Sequences) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss, float32 [], and its terms ``action`` and ``reward``."""
        kjts = self.lookups(batch)
        rows = self.items(kjts[0])
        steps = self._steps(batch, rows["seen"].values(), kjts, batch.skip,
                            batch.lengths - batch.skip)
        returns = self._as_input(batch.returns[steps.at] / self.scale)
        phi = self.backbone(steps.states, steps.actions, steps.rewards, returns)
        estimates = self.heads.rewards(phi, steps.actions)
        if self.estimate_returns:
            returns = self._estimated(returns, estimates, steps)
        valid, at = steps.valid, steps.at[steps.valid]
        out = steps.rows[valid] if self.config.tied else rows["chosen"].values()[at]
        action = self.negatives.loss(
            self.config, self.heads.queries(phi, returns)[valid], batch.items[at], out,
            kjts[0]["drawn"].values(), rows["drawn"].values()).mean()
        reward = reward_loss(self.config, estimates, steps.rewards)[valid].mean()
        loss = action + self.config.reward_weight * reward
        return loss, {"action": action.detach(), "reward": reward.detach()}

    def _steps(self, batch: Histories, seen: torch.Tensor, kjts: list[KeyedJaggedTensor],
               skip: torch.Tensor, num_steps: torch.Tensor) -> Steps:
        """Gather steps `skip` ... `skip + num_steps - 1` of each trajectory; `seen`: rows [L, D].

        The last step may be after the last interaction (the one to recommend for); then only its
        state is meaningful.
        """
        size, dim = batch.num_users, self.config.dim
        most = int(num_steps.max()) if size else 0
        first = torch.cumsum(batch.lengths, 0) - batch.lengths           # [B], start in [L]
        ahead = torch.arange(most, device=skip.device)
        place = skip[:, None] + ahead                                    # [B, T], in the trajectory
        valid = ahead < num_steps[:, None]
        place = torch.minimum(place, batch.lengths[:, None])
        at = first[:, None] + torch.minimum(place, (batch.lengths[:, None] - 1).clamp(min=0))
        if seen.shape[0]:
            at = at.clamp(max=seen.shape[0] - 1)
            rows, rewards = seen[at], batch.rewards[at]
        else:  # no user has a history
            rows, rewards = seen.new_zeros(size, most, dim), seen.new_zeros(size, most)
        parts = [self.history(padded(seen, batch.lengths), place)]
        if self.config.user_dim:
            user = self.users(kjts[1]).values()
            parts.append(user[:, None].expand(-1, most, -1))
        return Steps(self.state(torch.cat(parts, dim=-1)), self.action(rows), rows, rewards, at,
                     valid)

    def _estimated(self, returns: torch.Tensor, estimates: torch.Tensor, steps: Steps
                   ) -> torch.Tensor:
        """Replace the rewards of the subsequence in scaled returns-to-go by their estimates.

        ``g^_t = g_t + sum_{k >= t} gamma^(k - t) (r^_k - r_k)`` over its steps k.
        """
        estimated = torch.sigmoid(estimates) if self.config.reward_loss == "bce" else estimates
        change = torch.where(steps.valid, estimated.detach() - steps.rewards, 0.0) / self.scale
        span = torch.arange(change.shape[1], device=change.device)
        steps_between = (span[None, :] - span[:, None]).clamp(min=0)    # k - t
        weight = torch.triu(self.config.gamma ** steps_between)          # [t, k]
        return returns + change @ weight.T

    # ---- recommending ----

    def encode(self, histories: Histories) -> Encoded:
        """Encode users for their next item, conditioned on the target return-to-go.

        Only the last T + l - 1 items of a history are used."""
        recent = last(histories, self.config.steps + self.config.window - 1)
        num_steps = (recent.lengths + 1).clamp(max=self.config.steps)  # including the next item's
        skip = recent.lengths + 1 - num_steps
        kjts = self._kjts(recent, recent.items.new_zeros(0))
        seen = self.items(kjts[0])["seen"].values()
        steps = self._steps(recent, seen, kjts, skip, num_steps)
        phi = self.backbone(steps.states, steps.actions, steps.rewards,
                            self._wanted_returns(steps.rewards, num_steps))
        users = torch.arange(recent.num_users, device=phi.device)
        phi = phi[users, num_steps - 1]
        wanted = phi.new_full((recent.num_users,), self.target / self.scale)
        return Encoded(phi, self.heads.queries(phi, self._as_input(wanted)))

    def _as_input(self, returns: torch.Tensor) -> torch.Tensor:
        """Convert returns-to-go to the model's input: 0 with ``returns="none"``."""
        return torch.zeros_like(returns) if self.config.returns == "none" else returns

    def _wanted_returns(self, rewards: torch.Tensor, num_steps: torch.Tensor) -> torch.Tensor:
        """Compute scaled ``g_t = r_t + gamma g_{t+1}``, [B, T]; the last one is the target."""
        found = torch.zeros_like(rewards)
        coming = rewards.new_full((rewards.shape[0],), self.target)
        for t in reversed(range(rewards.shape[1])):
            before = t < num_steps - 1
            coming = torch.where(before, rewards[:, t] + self.config.gamma * coming, coming)
            found[:, t] = coming
        return self._as_input(found / self.scale)

    def scores(self, encoded: Encoded, items: torch.Tensor) -> torch.Tensor:
        """Compute ``<q, E^O[i]>``, float32 [B, n]."""
        return encoded.queries @ look_up(self.items, self.features, {"drawn": items}
                                         )["drawn"].values().T

    def rewards(self, encoded: Encoded, items: torch.Tensor) -> torch.Tensor:
        """Estimate the rewards of any items int64 [n] for each user, float32 [B, n]."""
        actions = self.action(look_up(self.items, self.features, {"seen": items})["seen"].values())
        shape = (encoded.phi.shape[0], *actions.shape)
        estimates = self.heads.rewards(encoded.phi[:, None].expand(shape), actions.expand(shape))
        return torch.sigmoid(estimates) if self.config.reward_loss == "bce" else estimates
