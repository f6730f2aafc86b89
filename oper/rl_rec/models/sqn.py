"""SASRec with Q-learning: SQN, SNQN, SA2C, and DQN.

Xin, Karatzoglou, Arapakis and Jose: "Self-Supervised Reinforcement Learning for Recommender
Systems" (SIGIR 2020, arXiv 2006.05779), "Supervised Advantage Actor-Critic for Recommender Systems"
(WSDM 2022, arXiv 2111.03474). The state s is the output of SASRec's network before item a; the
interaction with a and reward r leads to the state s' after a. In addition to next-item scores there
are two value heads, ``Q_h(s, i) = <W_h s + b_h, E[i]> + w_h s + c_h``, h = 1, 2:

    loss       L = weight(s, a) L_s(s, a) + q_weight L_q
    L_s        next-item loss, see `NextItem`
    L_q        mean over h of (y_h - Q_h(s, a))^2 / 2, plus the same for `q_negatives` other items n
    y_h        r + gamma Q_k(s', argmax_i Q_h(s', i)) with k the other head: double Q-learning (van
               Hasselt, NeurIPS 2010). For the last interaction of a subsequence, the logged
               return-to-go (r for the last one of a user)
    y_h for n  gamma Q_k(s, argmax_i Q_h(s, i)): reward 0 and unchanged state
    weight     1. With ``actor="advantage"``, after the first third of training, the advantage
               ``Q(s, a) - mean of Q over a and the other items n``, clipped to 0..10, where Q is
               the mean of the heads. With ``actor="none"`` there is no L_s, and Q ranks items

No gradient flows through y_h and the weight; that of L_q also trains the network and item rows.

Differences from the authors' code: two heads of one network that both learn at every step, instead
of two networks, one of which learns; Q uses the rows of the item table, not a separate output
layer; if `negatives` > 0, maxima are over the drawn items, and n are chosen among these; there is
only one learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from oper.ranges import Count, PositiveAmount, ShareBelowOne, one_of
from oper.rl_rec.models.base import Histories, Sequences, third_of, unpadded
from oper.rl_rec.models.sasrec import SASRec, SASRecConfig

Actor = Annotated[str, one_of("supervised", "advantage", "none")]
MOST_ADVANTAGE = 10.0


@dataclass(frozen=True, slots=True)
class SQNConfig(SASRecConfig):
    """Configuration of SQN; symbols are those of the module docstring.

    Attributes:
        gamma: discount of future rewards, 0 <= gamma < 1.
        q_weight: weight of L_q, the loss of the value heads.
        q_negatives: number of other items n per step, trained with reward 0.
        actor: ``"supervised"``: train the next-item loss, too; ``"advantage"``: weight it by the
            advantage of the chosen item; ``"none"``: no next-item loss, items are ranked by Q.
    """

    gamma: ShareBelowOne = 0.5
    q_weight: PositiveAmount = 1.0
    q_negatives: Count = 0
    actor: Actor = "supervised"

    def __post_init__(self) -> None:
        SASRecConfig.__post_init__(self)
        self.check(("q_negatives", self.actor != "advantage" or self.q_negatives >= 1,
                    ">= 1 with actor='advantage'"))


@dataclass(frozen=True, slots=True)
class SA2CConfig(SQNConfig):
    """Configuration of SA2C; with ``actor="supervised"``, of SNQN."""

    q_negatives: Count = 10
    actor: Actor = "advantage"


@dataclass(frozen=True, slots=True)
class DQNConfig(SQNConfig):
    """Configuration of DQN: double Q-learning without the next-item loss."""

    q_negatives: Count = 10
    actor: Actor = "none"


class SQN(SASRec):
    """The SQN family of models; see the module docstring. For arguments see `NextItem`."""

    config: SQNConfig

    def __init__(self, config: SQNConfig, num_items: int, device: str = "cpu") -> None:
        super().__init__(config, num_items, device)
        self.critic = nn.Linear(config.dim, 2 * (config.dim + 1))
        self.weigh = False

    def warm_up(self, num_steps: int) -> int:
        """Return the number of initial steps whose loss is not weighted by the advantage: with
        ``actor="advantage"`` a third of the steps, otherwise 0."""
        return third_of(num_steps) if self.config.actor == "advantage" else 0

    def schedule(self, step: int, num_steps: int) -> None:
        """With ``actor="advantage"``, weight L_s by advantages after the first third of training.
        """
        self.weigh = self.config.actor == "advantage" and step >= self.warm_up(num_steps)

    def _heads(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply both value heads to states [N, D]; returns queries [2, N, D], offsets [2, N]."""
        found = self.critic(states).view(-1, 2, self.config.dim + 1).transpose(0, 1)
        return found[..., :-1], found[..., -1]

    def values(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute Q of both heads, float32 [2, N, n], given states [N, D] and rows of items:
        [n, D], or [N, n, D] for different items per state."""
        queries, offsets = self._heads(states)
        return (rows @ queries.unsqueeze(-1)).squeeze(-1) + offsets.unsqueeze(-1) if (
            rows.ndim == 3) else queries @ rows.T + offsets.unsqueeze(-1)

    def losses(self, batch: Sequences, rows: torch.Tensor,
               drawn: tuple[torch.Tensor, torch.Tensor]
               ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `NextItem.losses`; the terms are ``action`` (with an actor) and ``q``."""
        outputs = self.outputs(*self.inputs(rows, batch, -1))
        before = unpadded(outputs, batch.lengths)  # the state before each interaction
        at = batch.is_step.nonzero()[:, 0]
        is_last = torch.isin(at, torch.cumsum(batch.lengths, 0) - 1)
        states, after = before[at], before[(at + 1).clamp(max=before.shape[0] - 1)]
        coming = torch.where(is_last, batch.returns[at],
                             batch.rewards[at] + self.config.gamma * self._best(after, drawn[1]))
        q = self.values(states, rows[at, None]).squeeze(-1)
        loss = 0.5 * (coming - q).square().mean(dim=0)
        weight = None
        if self.config.q_negatives:
            which = torch.randint(drawn[0].numel(), (at.numel(), self.config.q_negatives),
                                  device=at.device)
            other = self.values(states, drawn[1][which])
            kept = (drawn[0][which] != batch.items[at, None]).float()
            wanted = self.config.gamma * self._best(states, drawn[1]).unsqueeze(-1)
            loss = loss + (0.5 * (wanted - other).square().mean(dim=0) * kept).sum(dim=1)
            if self.weigh:
                mean = (q + (other * kept).sum(dim=-1)) / (1 + kept.sum(dim=1))
                weight = torch.zeros_like(batch.rewards).index_copy(
                    0, at, (q - mean).detach().mean(dim=0).clamp(0, MOST_ADVANTAGE))
        parts = {"q": loss.mean()}
        found = self.config.q_weight * parts["q"]
        if self.config.actor != "none":
            parts["action"] = self.action_loss(outputs, batch, rows, drawn, weight)
            found = found + parts["action"]
        return found, {name: part.detach() for name, part in parts.items()}

    @torch.no_grad()
    def _best(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Evaluate each head's best item, among rows [n, D], by the other head; [2, N]."""
        found = self.values(states, rows)
        return found.flip(0).gather(2, found.argmax(dim=2, keepdim=True)).squeeze(2)

    def encode(self, histories: Histories) -> torch.Tensor:
        """Compute queries that score next items by an inner product; float32 [B, D].

        They are the outputs of the actor or, without one, the mean queries of the two Q-heads.
        Scores of the latter are Q up to a constant per user, so that rankings are the same.
        """
        states = super().encode(histories)
        return states if self.config.actor != "none" else self._heads(states)[0].mean(dim=0)
