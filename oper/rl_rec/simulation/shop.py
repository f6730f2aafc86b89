"""A simulated shop with the mechanics of VirtualTaobao, for many customers at once.

Shi et al., "Virtual-Taobao" (AAAI 2019, arXiv 1805.10000), as implemented in their public release:

    customer   z ~ U[0, 1]^128 -> network -> logits of 11 groups (88 in total); one draw per group
               gives a one-hot vector per group, 88 features
    patience   88 features -> network -> logits of the page 0..100 at which the customer leaves
    page       (88 features, page number, action in [-1, 1]^27) -> network -> 11 + 10 logits, from
               which clicks 0..10 (the reward) and a second attribute 0..9 are drawn
    end        a visit ends when the number of shown pages reaches the customer's patience
    return     with `Returning`, an addition of this project: whether customers return depends on
               what they have been shown

The networks are three multi-layer perceptrons with LeakyReLU. Their trained weights are not part of
this project: `load_virtual_taobao` reads them from a folder that the user provides.
`synthetic_shop` draws networks of the same shape from a seed. Customers are synthetic in both
cases: click-through rates here say nothing about a real shop, and the release's networks reward
actions that no real shop would take.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from oper.errors import FileFormatError, InvalidInputError, require_fields
from oper.ranges import Positive, Share, ShareBelowOne, rules_of

GROUPS = (8, 8, 11, 11, 11, 11, 2, 2, 3, 18, 3)
NUM_FEATURES, SEED_DIM, ACTION_DIM = sum(GROUPS), 128, 27
MAX_PAGE, MAX_CLICKS, NUM_ATTRIBUTES = 100, 10, 10
# Observation: features, last clicks, last attribute, page; with `Returning`, also day, visits and
# satisfaction.
OBSERVATION_DIM = NUM_FEATURES + 3
RETURNING_DIM = OBSERVATION_DIM + 3
PAGE, VISITS = NUM_FEATURES + 2, OBSERVATION_DIM + 1  # indices in an observation
_MOST_ATTRIBUTE = NUM_ATTRIBUTES - 1
# SHA-256 of the files of eyounx/VirtualTaobao 0.0.5.
WEIGHTS = {
    "generator_model.pt": "15f4f5b05df3de81016cde4b29379d24cf8b4fcb076d78055b06984137a983ac",
    "leave_model.pt": "022d7f88e180899bd8fe6b26b82b6ccca8bbb82d253b30ebac372534e8a2df12",
    "action_model.pt": "eceebf80181735459eec841cb1f73fa1a3f5f2796f68f4f8366a36d5e8da7be8",
}


def _network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.LeakyReLU()]
    return nn.Sequential(*layers[:-1]).requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Returning:
    """Parameters that decide whether and when customers return.

    The second attribute of a page is interpreted as the time spent on it. Satisfaction u is the
    moving average of this time over the pages so far, divided by its maximum; it starts at 1/2. At
    the end of a visit, a customer leaves for good with probability ``lost (1 - u)``, or returns
    after ``1 + Binomial(longest - 1, 1 - u)`` days if that is within the horizon.

    Attributes:
        horizon: number of simulated days; the first visit is on day 1.
        memory: weight of the previous average in the moving average.
        lost: probability that a customer with satisfaction 0 never returns.
        longest: maximum number of days between two visits.
    """

    horizon: Positive = 30
    memory: ShareBelowOne = 0.7
    lost: Share = 0.3
    longest: Positive = 10

    def __post_init__(self) -> None:
        require_fields(self, "invalid options of returning customers",
                       "change this field of Returning", *rules_of(self))


@dataclass(frozen=True, slots=True, eq=False)
class Shop:
    """The three networks of a shop; see the module docstring.

    Attributes:
        name: source of the networks.
        customer: random vector [n, 128] -> logits of features [n, 88].
        patience: features [n, 88] -> logits of patience [n, 101].
        page: features, page number, action [n, 116] -> logits of clicks and attribute [n, 21].
        returning: parameters of returning customers; None = each customer makes one visit.
    """

    name: str
    customer: nn.Module
    patience: nn.Module
    page: nn.Module
    returning: Returning | None = None

    def expected(self, features: torch.Tensor, page: torch.Tensor, actions: torch.Tensor
                 ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute expected clicks and second attribute of a page, float32 [n] each.

        Args:
            features: features of the customers, float32 [n, 88].
            page: number of pages shown before, float32 [n].
            actions: float32 [n, 27].
        """
        logits = self.page(torch.cat([features, page[:, None], actions], dim=1))
        clicks, other = (
            torch.softmax(part, dim=1) @ torch.arange(part.shape[1], dtype=torch.float32)
            for part in logits.split([MAX_CLICKS + 1, NUM_ATTRIBUTES], dim=1))
        return clicks, other


def _empty_shop(name: str, returning: Returning | None) -> Shop:
    return Shop(name, _network(SEED_DIM, 128, NUM_FEATURES),
                _network(NUM_FEATURES, 128, 256, MAX_PAGE + 1),
                _network(NUM_FEATURES + 1 + ACTION_DIM, 128, 256, MAX_CLICKS + 1 + NUM_ATTRIBUTES),
                returning)


def load_virtual_taobao(folder: str | os.PathLike[str], returning: Returning | None = None) -> Shop:
    """Load VirtualTaobao's networks from the three weight files of its release 0.0.5.

    Only tensors are unpickled, and only from files with the release's SHA-256. `returning` is an
    addition: customers of VirtualTaobao do not return.

    Raises:
        FileFormatError: a file is missing or differs from the release's.
    """
    shop = _empty_shop("VirtualTaobao 0.0.5", returning)
    what = f"cannot read VirtualTaobao's weights in {os.fspath(folder)!r}"
    for (name, digest), network in zip(WEIGHTS.items(), (shop.customer, shop.patience, shop.page),
                                       strict=True):
        path = Path(folder) / name
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            raise FileFormatError(what, "file", name, "an existing file",
                                  "put the release's weight files there") from None
        if found != digest:
            raise FileFormatError(what, f"SHA-256 of {name}", found, digest,
                                  "use the file of release 0.0.5")
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return shop


def synthetic_shop(seed: int = 0, returning: Returning | None = None) -> Shop:
    """Draw networks of VirtualTaobao's shapes from a seed; they are not fitted to any shop.

    Customers differ and stay for about eight pages. The logit of k clicks grows with k times a
    random function of customer, page and action.

    With `returning`, a visit has about three pages, and the second attribute depends on another
    such function, which is almost unrelated to the first: the items with the most clicks are not
    those that make customers return.
    """
    shop = _empty_shop(f"synthetic shop {seed}", returning)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for network, gain in ((shop.customer, 3.0), (shop.patience, 1.5), (shop.page, 1.8)):
            for layer in network.modules():
                if isinstance(layer, nn.Linear):
                    std = gain / layer.in_features ** 0.5
                    layer.weight.copy_(torch.randn(layer.weight.shape, generator=g) * std)
                    layer.bias.zero_()
        last = _last(shop.patience)
        pages = torch.arange(MAX_PAGE + 1, dtype=torch.float32)
        last.weight.mul_(0.3)
        last.bias.copy_(-0.5 * (pages - (3 if returning else 8)).square() / 4)
        first, last = shop.page[0], _last(shop.page)  # type: ignore[index]
        first.weight[:, NUM_FEATURES] *= 0.02  # page numbers are large
        first.weight[:, NUM_FEATURES + 1:] *= 1.5
        suits = torch.randn(256, generator=g) / 16  # how much the hidden units add to clicks
        clicks = torch.arange(MAX_CLICKS + 1, dtype=torch.float32)
        last.weight[:MAX_CLICKS + 1] = 0.4 * clicks[:, None] * suits
        last.bias[:MAX_CLICKS + 1] = -0.9 * clicks
        if returning:
            # How much they add to the second attribute.
            keeps = 0.95 * torch.randn(256, generator=g) / 16 + 0.3 * suits
            attribute = clicks[:NUM_ATTRIBUTES]
            last.weight[MAX_CLICKS + 1:] = 0.4 * attribute[:, None] * keeps
            last.bias[MAX_CLICKS + 1:] = -0.6 * attribute
    return shop


def _last(network: nn.Module) -> nn.Linear:
    return [m for m in network.modules() if isinstance(m, nn.Linear)][-1]


class Visits:
    """Simultaneous visits of n customers, with their own random generator.

    Attributes:
        features: float32 [n, 88], one-hot by group.
        page: number of pages shown so far in this visit, int64 [n].
        clicks, attribute: clicks and second attribute of the visit's last page, int64 [n].
        done: whether customers have left for good, bool [n].
        day, visits: day of the current visit, and number of visits including it, int64 [n].
        satisfaction: moving average of the attribute (0..9), see `Returning`, float32 [n].
    """

    def __init__(self, shop: Shop, count: int, seed: int) -> None:
        """Let `count` customers enter; raises InvalidInputError if `count` < 1."""
        if count < 1:
            raise InvalidInputError("cannot simulate visits", "count", count, ">= 1",
                                    "simulate at least one customer")
        self.shop = shop
        self._generator = torch.Generator().manual_seed(seed)
        self.enter(torch.ones(count, dtype=torch.bool))

    def enter(self, who: torch.Tensor) -> None:
        """Replace the customers in the mask `who`, bool [n], by new ones."""
        if not hasattr(self, "done"):
            n = who.numel()
            self.features = torch.zeros(n, NUM_FEATURES)
            self.page, self.clicks, self.attribute, self._patience, self.day, self.visits = (
                torch.zeros(n, dtype=torch.int64) for _ in range(6))
            self.satisfaction = torch.zeros(n)
            self.done = torch.ones(n, dtype=torch.bool)
        count = int(who.sum())
        if not count:
            return
        with torch.no_grad():
            logits = self.shop.customer(torch.rand(count, SEED_DIM, generator=self._generator))
            groups = [nn.functional.one_hot(self._draw(part), part.shape[1]).float()
                      for part in logits.split(GROUPS, dim=1)]
            features = torch.cat(groups, dim=1)
            patience = self._draw(self.shop.patience(features))
        self.features[who], self._patience[who] = features, patience
        for state in (self.page, self.clicks, self.attribute):
            state[who] = 0
        self.day[who] = self.visits[who] = 1
        self.satisfaction[who] = _MOST_ATTRIBUTE / 2
        self.done[who] = False

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(torch.softmax(logits, dim=1), 1, generator=self._generator)[:, 0]

    def observe(self) -> torch.Tensor:
        """Return observations, float32 [n, 91]: features, clicks and attribute of the last page,
        pages shown; with `Returning` [n, 94]: also day, visits and satisfaction."""
        rest = [self.clicks, self.attribute, self.page]
        if self.shop.returning:
            rest += [self.day, self.visits, self.satisfaction]
        return torch.cat([self.features, torch.stack([x.float() for x in rest], dim=1)], dim=1)

    def step(self, actions: torch.Tensor) -> torch.Tensor:
        """Show a page to every customer who has not left; returns clicks int64 [n], 0 if left.

        Args:
            actions: float32 [n, 27], clamped to [-1, 1].

        Raises:
            InvalidInputError: `actions` has another shape or is not finite.
        """
        if actions.shape != (self.done.numel(), ACTION_DIM) or not bool(actions.isfinite().all()):
            raise InvalidInputError("cannot show a page", "shape, non-finite values of actions",
                                    (tuple(actions.shape), int((~actions.isfinite()).sum())),
                                    f"[{self.done.numel()}, {ACTION_DIM}], all finite",
                                    "pass a finite action for each customer")
        here = ~self.done
        seen = torch.cat([self.features, self.page[:, None].float(), actions.clamp(-1, 1)], dim=1)
        with torch.no_grad():
            logits = self.shop.page(seen)
        clicks, other = (self._draw(part) for part in logits.split(
            [MAX_CLICKS + 1, NUM_ATTRIBUTES], dim=1))
        self.clicks = torch.where(here, clicks, self.clicks)
        self.attribute = torch.where(here, other, self.attribute)
        self.page = self.page + here
        ended = here & (self.page >= self._patience)
        if self.shop.returning:
            self._return(self.shop.returning, here, ended)
        else:
            self.done = self.done | ended
        return torch.where(here, clicks, 0)

    def _return(self, law: Returning, here: torch.Tensor, ended: torch.Tensor) -> None:
        """Let customers whose visit has ended leave for good or begin another visit."""
        average = law.memory * self.satisfaction + (1 - law.memory) * self.attribute
        self.satisfaction = torch.where(here, average, self.satisfaction)
        discontent = 1 - self.satisfaction / _MOST_ATTRIBUTE
        # Drawn for all customers, so that a customer's draws are the same under every policy.
        luck = torch.rand(here.numel(), law.longest, generator=self._generator)
        with torch.no_grad():
            patience = self._draw(self.shop.patience(self.features))
        day = self.day + 1 + (luck[:, 1:] < discontent[:, None]).sum(dim=1)
        gone = (luck[:, 0] < law.lost * discontent) | (day > law.horizon)
        self.done = self.done | (ended & gone)
        back = ended & ~gone
        self.day, self.visits = torch.where(back, day, self.day), self.visits + back
        self._patience = torch.where(back, patience, self._patience)
        self.page, self.clicks, self.attribute = (
            torch.where(back, 0, state) for state in (self.page, self.clicks, self.attribute))
