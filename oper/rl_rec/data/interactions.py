"""Interactions of users with items, split into training, validation and test.

The ranking protocol is that of RecBole's full-ranking evaluation: iterative k-core,
leave-last-two-out or a split by time, all items ranked, the user's history masked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

import numpy as np

from oper.data import Folder
from oper.data.arrays import places_of
from oper.data.folder import SPLITS
from oper.errors import InvalidInputError, require_fields
from oper.ranges import Count, Positive, one_of, rules_of

PROTOCOLS = ("leave_last_two", "leave_last_baskets", "time", "held_out_users")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How a log becomes interactions.

    Attributes:
        user, item: sparse columns of the folder.
        k_core: users and items with fewer interactions are removed, repeatedly, until none are
            left.
        item_core: the minimum for items, if it differs from that for users; 0 = `k_core`.
        only: ``"positive"``: interactions without a reward are removed before anything is counted;
            ``"all"``: they stay, as part of the history.
        protocol: ``"leave_last_two"``: the last two positive interactions of a user are its
            validation and its test target, and the earlier ones are for training.
            ``"leave_last_baskets"``: the same with a user's last two baskets that contain a
            positive item which no earlier basket contains; all such items are targets. This is for
            logs with several rows at one time, in which the last row of a basket is no later than
            the one before. ``"time"``: the same two points in time for all users.
            ``"held_out_users"``: users drawn for validation and for test are not used for training;
            a random share of each one's interactions is its history, and the positive ones of the
            rest are its targets (strong generalisation: Liang et al. 2018). Items that no training
            user has are removed.
        basket: sparse column whose equal values form one basket of a user, such as the number of an
            invoice or session (``"leave_last_baskets"`` only). The rows of a basket are moved to
            its first row.
        valid, test: shares of the interactions after those points (``"time"``), or of the users
            (``"held_out_users"``; from 1 on a number of users).
        fold_in: share of a held-out user's interactions that is its history.
        seed: seed of the draws of ``"held_out_users"``.
        repeats: ``"first"``: a user's interactions with an item count once, at their first time;
            ``"keep"``: all of them.
    """

    user: str = "user"
    item: str = "item"
    k_core: Positive = 5
    protocol: Annotated[str, one_of(*PROTOCOLS)] = "leave_last_two"
    valid: float = 0.1
    test: float = 0.1
    repeats: Annotated[str, one_of("first", "keep")] = "first"
    basket: str = ""
    item_core: Count = 0
    only: Annotated[str, one_of("all", "positive")] = "all"
    fold_in: float = 0.8
    seed: Count = 0

    def __post_init__(self) -> None:
        shares = self.valid + self.test
        users = self.protocol == "held_out_users" and self.valid >= 1 and self.test >= 1
        require_fields(
            self, "invalid data options", "change the section [interactions] of the configuration",
            *rules_of(self), ("fold_in", 0 < self.fold_in < 1, "a share between 0 and 1"),
            ("basket", bool(self.basket) == (self.protocol == "leave_last_baskets"),
             "a column with protocol='leave_last_baskets', and none with another"),
            ("valid", users or 0 < self.valid < 1, "a share between 0 and 1"),
            ("test", users or (0 < self.test < 1 and shares < 1), "a share, with valid below 1"))


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """The targets of one split.

    Attributes:
        users: int64 [U], ascending.
        stop: int64 [U]: the history of a user is rows ``offsets[u]:stop`` of the interactions.
        targets: int64 [P], items to be found, user by user; positive and not in the history.
        target_lengths: int64 [U], number of targets of each user, all >= 1.
    """

    users: np.ndarray
    stop: np.ndarray
    targets: np.ndarray
    target_lengths: np.ndarray


class Log(NamedTuple):
    """Rows in the order of the log: raw ids int64 [N], rewards float32 [N], seconds int64 [N], and
    raw ids of baskets int64 [N], if there are any."""

    users: np.ndarray
    items: np.ndarray
    rewards: np.ndarray
    times: np.ndarray
    baskets: np.ndarray | None = None

    def rows(self, chosen: np.ndarray) -> Log:
        """The chosen rows: numbers int64 [M], or bool [N]."""
        return Log(*(c if c is None else c[chosen] for c in self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Interactions ordered by user, then time (of the basket, if there are baskets), then position
    in the log.

    Attributes:
        users, items: int64 [N], ids from 1 by training interactions, descending; 0 never occurs:
            it stands for padding.
        rewards: float32 [N], the folder's label.
        times: int64 [N], seconds since 1970.
        offsets: int64 [num_users + 1]: rows ``offsets[u]:offsets[u + 1]`` are user u's.
        train_stop: int64 [num_users]: rows ``offsets[u]:train_stop[u]`` are for training.
        num_users, num_items: rows of their tables, row 0 counted.
        item_ids: int64 [num_items], the folder's id of each item; 0 for row 0.
        valid, test: the held-out targets.
        source: where the log comes from, as text.
        left_out: number of rows of the log that were left out, by reason.
    """

    users: np.ndarray
    items: np.ndarray
    rewards: np.ndarray
    times: np.ndarray
    offsets: np.ndarray
    train_stop: np.ndarray
    num_users: int
    num_items: int
    item_ids: np.ndarray
    valid: HeldOut
    test: HeldOut
    source: str = ""
    left_out: dict[str, int] = field(default_factory=dict)

    def held_out(self, split: str) -> HeldOut:
        """The targets of ``"valid"`` or ``"test"``; raises InvalidInputError for another name."""
        if split not in ("valid", "test"):
            raise InvalidInputError("no such targets", "split", split, "valid or test",
                                    "ask for one of the two held-out parts")
        return self.valid if split == "valid" else self.test

    def training_rows(self) -> np.ndarray:
        """Numbers of all training rows, int64 [M], ascending."""
        at = np.arange(self.users.size)
        return at[at < self.train_stop[self.users]]

    def popularity(self) -> np.ndarray:
        """Training interactions by item, int64 [num_items]; descending from item 1 on."""
        return np.bincount(self.items[self.training_rows()], minlength=self.num_items)

    def rows_between(self, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers of several ranges ``first[k]:last[k]`` one after another, int64 [L], and
        their lengths int64 [K]."""
        return places_of(first, last - first), last - first


def load_interactions(path: str | os.PathLike[str], options: DataOptions | None = None
                      ) -> Interactions:
    """The interactions of a folder that ``oper preprocess`` wrote, all its parts together.

    Rows whose user or item is missing, or has the folder's id 0 (rare, cut or unseen), are left out
    and counted; preprocess with ``--min-count 1 --valid 0 --test 0`` so that only missing ones are
    left out.

    Raises:
        FileFormatError: not such a folder.
        InvalidInputError: it has no such columns or no times, or no interactions are left.
    """
    options = options or DataOptions()
    folder = Folder.open(path)
    what = f"cannot read interactions from {os.fspath(path)!r}"
    single = [name for name in folder.sparse if name not in folder.multi_hot]
    for key in ("user", "item", *(["basket"] if options.basket else [])):
        if getattr(options, key) not in single:
            raise InvalidInputError(what, "column", getattr(options, key), f"one of {single}",
                                    f"set interactions.{key}")
    if not folder.time:
        raise InvalidInputError(what, "time column", None, "a log with times",
                                "name the log's time column in its recipe")
    columns = tuple(filter(None, (options.user, options.item, folder.label, folder.time,
                                  options.basket)))
    tables = [folder.read_part(part, columns)
              for split in SPLITS for part in folder.parts(split)]

    def column(name: str, dtype: type[np.generic]) -> np.ndarray:
        parts = [t.column(name).to_numpy() for t in tables]
        return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)

    def known(name: str) -> np.ndarray:
        ids = column(name, np.int64)
        # A missing field may have a row, for models that learn from its absence; here it is none.
        return np.where(ids == folder.missing_ids[name], 0, ids)

    log = Log(known(options.user), known(options.item), column(folder.label, np.float32),
              column(folder.time, np.int64), known(options.basket) if options.basket else None)
    recipe = folder.manifest.get("recipe", {}).get("name", "?")
    return from_log(log, options, f"recipe {recipe}")


def from_log(log: Log, options: DataOptions, source: str = "") -> Interactions:
    """Interactions from rows in any order; raw ids of 0 are left out.

    Raises:
        InvalidInputError: no interactions or no training users are left, or the protocol needs
            baskets and there are none.
    """
    left_out = {}

    def keep(kept: np.ndarray, reason: str) -> None:
        nonlocal log
        left_out[reason] = int(kept.size - kept.sum())
        log = log.rows(kept)

    keep((log.users > 0) & (log.items > 0), "without user or item")
    if options.only == "positive":
        keep(log.rewards > 0, "without reward")
    order = np.lexsort((log.times, log.users))  # stable: equal times keep the order of the log
    log = log.rows(order)
    if options.basket:
        keep(_baskets_of(log) > 0, "without basket")
        log = log.rows(_by_basket(log))
    if options.repeats == "first":
        keep(_first_of_pairs(log), "repeats")
    keep(_core(log, options), f"outside the {options.k_core}-core")
    held = np.zeros((2, 0), bool)
    if options.protocol == "held_out_users":
        held = _drawn_users(log, options)
        known = np.isin(log.items, log.items[~held.any(axis=0)])
        keep(known, "items of no training user")
        held = held[:, known]
    if not log.users.size:
        raise InvalidInputError("no interactions are left", "left out", left_out, "some rows",
                                "lower interactions.k_core, or preprocess with --min-count 1")
    _, users = np.unique(log.users, return_inverse=True)
    raw_items, items = np.unique(log.items, return_inverse=True)
    log = log._replace(users=users, items=items)
    if options.protocol == "held_out_users":
        log, cut = _fold_in(log, held, options)
    else:
        cut = _Cut.of(log, options)
    is_training = np.arange(users.size) < cut.train_stop[users]
    ranks = [_by_count(ids, is_training) for ids in (users, items)]
    item_ids = np.zeros(raw_items.size + 1, np.int64)
    item_ids[ranks[1]] = raw_items
    return replace(_numbered(log, cut, ranks[0], ranks[1]), item_ids=item_ids, source=source,
                   left_out=left_out)


def _baskets_of(log: Log) -> np.ndarray:
    """The basket of each row, int64 [N]; raises InvalidInputError if there are none."""
    if log.baskets is None:
        raise InvalidInputError("cannot hold out baskets", "baskets of the log", None,
                                "an id per row", "give a Log with baskets")
    return log.baskets


def _by_basket(log: Log) -> np.ndarray:
    """Row numbers int64 [N] with each user's baskets together, in the order of their first rows;
    rows are in order of user already."""
    pairs = np.stack([log.users, _baskets_of(log)])
    _, first, basket = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    return np.argsort(first[basket.reshape(-1)], kind="stable")


def _first_of_pairs(log: Log) -> np.ndarray:
    """Whether each row is the first of its user and item, bool [N]."""
    order = np.lexsort((log.items, log.users))
    pairs = np.stack([log.users[order], log.items[order]])
    new = np.ones(order.size, bool)
    new[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
    first = np.zeros(order.size, bool)
    first[order[new]] = True
    return first


def _core(log: Log, options: DataOptions) -> np.ndarray:
    """Rows of the core, bool [N]: every user and item in it has at least the required number of
    rows in it."""
    kept = np.ones(log.users.size, bool)
    _, users = np.unique(log.users, return_inverse=True)
    _, items = np.unique(log.items, return_inverse=True)
    while True:
        enough = kept.copy()
        for ids, k in ((users, options.k_core), (items, options.item_core or options.k_core)):
            enough &= (np.bincount(ids[kept], minlength=ids.max(initial=-1) + 1) >= k)[ids]
        if (enough == kept).all():
            return kept
        kept = enough


def _drawn_users(log: Log, options: DataOptions) -> np.ndarray:
    """Rows of the users drawn for validation and for test, bool [2, N]; the others are for
    training."""
    _, users = np.unique(log.users, return_inverse=True)
    num_users = int(users.max(initial=-1)) + 1
    counts = [int(n if n >= 1 else n * num_users) for n in (options.valid, options.test)]
    if num_users and sum(counts) >= num_users:
        raise InvalidInputError("cannot hold out users", "interactions.valid and .test",
                                (options.valid, options.test), f"fewer than {num_users} users",
                                "hold out fewer")
    order = np.random.default_rng((options.seed, 0)).permutation(num_users)
    drawn = np.zeros((2, num_users), bool)
    drawn[0, order[:counts[0]]] = drawn[1, order[counts[0]:sum(counts)]] = True
    return drawn[:, users]


def _fold_in(log: Log, held: np.ndarray, options: DataOptions) -> tuple[Log, _Cut]:
    """Rows ordered by user, with the targets of held-out users moved to the end of each user, and
    the cut.

    A user with n rows has ``floor((1 - fold_in) n)`` random targets, so none if n is small.
    """
    counts = np.bincount(log.users)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    drawn = np.lexsort((np.random.default_rng((options.seed, 1)).random(log.users.size), log.users))
    place = np.empty(log.users.size, np.int64)  # of a row among its user's in random order
    place[drawn] = np.arange(log.users.size) - offsets[log.users[drawn]]
    histories = np.ceil(np.round(options.fold_in * counts, 6)).astype(np.int64)
    asked = held.any(axis=0) & (place >= histories[log.users])
    order = np.lexsort((asked, log.users))
    log, held, asked = log.rows(order), held[:, order], asked[order]
    targets = asked & (log.rewards > 0) & _first_of_pairs(log)
    stop = offsets[:-1] + histories
    trains = ~np.any(held, axis=0).reshape(-1)[offsets[:-1]]
    return log, _Cut(np.where(trains, offsets[1:], offsets[:-1]), (stop, stop),
                     (targets & held[0], targets & held[1]))


def _by_count(ids: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """New id of each id: 1 for the one counted most often, ties by old id. int64 [K]."""
    counts = np.bincount(ids[counted], minlength=int(ids.max()) + 1)
    rank = np.empty(counts.size, np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(1, counts.size + 1)
    return rank


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """By user 0, 1, ...: the rows at which training and the two histories end; and which rows are
    targets of each split (bool [N])."""

    train_stop: np.ndarray
    stops: tuple[np.ndarray, np.ndarray]
    targets: tuple[np.ndarray, np.ndarray]

    @staticmethod
    def of(log: Log, options: DataOptions) -> _Cut:
        num_users = int(log.users[-1]) + 1
        offsets = np.concatenate([[0], np.cumsum(np.bincount(log.users, minlength=num_users))])
        if options.protocol == "time":
            return _Cut._at_times(log, options, offsets)
        at, wanted = np.arange(log.users.size), log.rewards > 0
        begins = at  # of what is held out: a row, or a basket
        if options.protocol == "leave_last_baskets":
            new = np.ones(at.size, bool)
            new[1:] = (np.diff(log.users) != 0) | (np.diff(_baskets_of(log)) != 0)
            begins = np.maximum.accumulate(np.where(new, at, 0))
            wanted = wanted & _first_of_pairs(log)  # with repeats kept: not in the history
        points = np.unique(begins[wanted])
        ends = np.cumsum(np.bincount(log.users[points], minlength=num_users))
        has_two = np.diff(ends, prepend=0) >= 2
        stops = [np.zeros(num_users, np.int64) for _ in range(2)]
        for back, stop in zip((2, 1), stops, strict=True):
            stop[has_two] = points[ends[has_two] - back]
        # A user without a history before the validation targets only trains.
        asked = has_two & (stops[0] > offsets[:-1])
        targets = [wanted & asked[log.users] & (begins == stop[log.users]) for stop in stops]
        return _Cut(np.where(asked, stops[0], offsets[1:]), (stops[0], stops[1]),
                    (targets[0], targets[1]))

    @staticmethod
    def _at_times(log: Log, options: DataOptions, offsets: np.ndarray) -> _Cut:
        ordered = np.sort(log.times)
        shares = (1 - options.valid - options.test, 1 - options.test)
        points = [ordered[min(ordered.size - 1, int(s * ordered.size))] for s in shares]
        num_users = offsets.size - 1
        stops = [offsets[:-1] + np.bincount(log.users[log.times < p], minlength=num_users)
                 for p in points]
        at = np.arange(log.users.size)
        targets = []
        for k, stop in enumerate(stops):
            end = stops[1] if k == 0 else offsets[1:]
            new = _first_of_pairs(log)  # with repeats kept: not in the history, and named once
            mask = new & (log.rewards > 0) & (at >= stop[log.users]) & (at < end[log.users])
            targets.append(mask & (stop > offsets[:-1])[log.users])
        return _Cut(stops[0], (stops[0], stops[1]), (targets[0], targets[1]))


def _numbered(log: Log, cut: _Cut, user_id: np.ndarray, item_id: np.ndarray) -> Interactions:
    """The interactions with their final ids, without the folder's ids."""
    num_users = user_id.size + 1
    old_offsets = np.concatenate([[0], np.cumsum(np.bincount(log.users))])
    users = user_id[log.users]
    order = np.argsort(users, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(users, minlength=num_users))])
    moved = np.zeros(num_users, np.int64)  # from an old row number to the new one, by new user
    moved[user_id] = offsets[user_id] - old_offsets[:-1]

    def by_user(rows: np.ndarray) -> np.ndarray:
        found = np.zeros(num_users, np.int64)
        found[user_id] = rows
        return found + moved

    items = item_id[log.items][order]
    held = []
    for stop, is_target in zip(cut.stops, cut.targets, strict=True):
        mask = is_target[order]
        lengths = np.bincount(users[order][mask], minlength=num_users)
        asked = np.flatnonzero(lengths)
        held.append(HeldOut(asked, by_user(stop)[asked], items[mask], lengths[asked]))
    return Interactions(
        users[order], items, log.rewards[order], log.times[order], offsets,
        by_user(cut.train_stop), num_users, item_id.size + 1, np.zeros(0, np.int64), held[0],
        held[1])
