"""Interactions of users with items, split into training, validation and test.

The ranking protocol is that of RecBole's full-ranking evaluation: iterative k-core,
leave-last-two-out or a split by time, all items ranked, the user's history masked.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, NamedTuple

import numpy as np

from oper.data import Folder
from oper.data.arrays import places_of
from oper.errors import InvalidInputError, require_fields
from oper.ranges import Count, Finite, Positive, PositiveAmount, one_of, rules_of

PROTOCOLS = ("leave_last_two", "leave_last_baskets", "time", "held_out_users")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How a log becomes interactions, and what is held out.

    Attributes:
        user, item: names of the folder's sparse columns of users and items.
        k_core: minimum number of interactions per user and item, reached by repeated removal.
        item_core: the minimum for items, if it differs from that for users; 0 = `k_core`.
        only: ``"positive"``: interactions with reward <= 0 are removed first; ``"all"``: they are
            part of the history.
        protocol: what is held out.
            ``"leave_last_two"``: the last two positive interactions of a user are its validation
            and its test target; the interactions before them are for training.
            ``"leave_last_baskets"``: the same with a user's last two baskets that contain a
            positive item not in earlier baskets; all such items are targets. For logs in which
            several rows have one time, so that rows within a basket have no order.
            ``"time"``: positive interactions in two last periods, the same periods for all users.
            ``"held_out_users"``: users drawn for validation and test do not train. A random share
            `fold_in` of each one's interactions is its history, and the positive ones of the rest
            are its targets (strong generalisation, Liang et al. 2018). Items that no training user
            has are removed.
        valid, test: share of the interactions in each period (``"time"``), or share of the users
            (``"held_out_users"``; both values >= 1 are numbers of users).
        repeats: ``"first"``: only a user's first interaction with an item is kept; ``"keep"``: all.
        basket: sparse column whose equal values form a basket of a user, such as an invoice number
            (``"leave_last_baskets"`` only). The rows of a basket are moved to its first row.
        fold_in: share of a held-out user's interactions that is its history.
        reward_offset, reward_scale: the reward is ``(label - reward_offset) / reward_scale``. An
            interaction is positive if its reward is > 0; so with ratings 1 to 10 as labels,
            ``reward_offset = 7`` makes ratings of 8 or more positive, in grades.
        seed: seed of the draws of ``"held_out_users"``.
        action: sparse column of interactions' kinds, such as view or purchase; HSTU only.
        content: sparse columns that describe items, such as a category or brand, with equal values
            in all rows of an item; HSTU only.
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
    reward_offset: Finite = 0.0
    reward_scale: PositiveAmount = 1.0
    action: str = ""
    content: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shares = self.valid + self.test
        users = self.protocol == "held_out_users" and self.valid >= 1 and self.test >= 1
        require_fields(
            self, "invalid data options", "change the section [interactions] of the configuration",
            *rules_of(self), ("fold_in", 0 < self.fold_in < 1, "a share between 0 and 1"),
            ("basket", bool(self.basket) == (self.protocol == "leave_last_baskets"),
             "a column if and only if protocol='leave_last_baskets'"),
            ("content", len(set(self.content)) == len(self.content), "every column once"),
            ("valid", users or 0 < self.valid < 1, "a share between 0 and 1"),
            ("test", users or (0 < self.test < 1 and shares < 1),
             f"a share between 0 and 1 - valid = {1 - self.valid:g}"))


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """The held-out targets of one split, validation or test.

    Attributes:
        users: ids of the users with targets, int64 [U], ascending.
        stop: int64 [U]; a user's history is rows ``offsets[u]:stop`` of the interactions.
        targets: item ids, int64 [P], user by user. Their rewards are positive, and they are not in
            the history.
        target_lengths: number of targets of each user, int64 [U], all >= 1.
    """

    users: np.ndarray
    stop: np.ndarray
    targets: np.ndarray
    target_lengths: np.ndarray


class Log(NamedTuple):
    """N rows in the order of the log: ids of users and items int64 (<= 0 = missing), rewards
    float32 (before `from_log`: labels), times int64 in seconds, ids of baskets int64
    (<= 0 = missing) or None, and ids of `DataOptions.action`, if any, and `content`, int64 [N, C]
    (0 = missing), or None."""

    users: np.ndarray
    items: np.ndarray
    rewards: np.ndarray
    times: np.ndarray
    baskets: np.ndarray | None = None
    features: np.ndarray | None = None

    def rows(self, chosen: np.ndarray) -> Log:
        """Select rows by indices int64 [M] or a mask bool [N]."""
        return Log(*(c if c is None else c[chosen] for c in self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """N interactions, ordered by user, then time (of the basket, if any), then position in the log.

    With ``"held_out_users"``, rows of held-out users that are not history come last in each user.

    Attributes:
        users, items: ids int64 [N], 1, 2, ... by descending number of training interactions; 0 is
            padding and does not occur.
        rewards: float32 [N], see `DataOptions.reward_offset`.
        times: int64 [N], seconds since 1970.
        offsets: int64 [num_users + 1]; rows ``offsets[u]:offsets[u + 1]`` are user u's.
        train_stop: int64 [num_users]; rows ``offsets[u]:train_stop[u]`` are for training.
        num_users, num_items: rows of the embedding tables, padding row 0 included.
        item_ids: the folder's id of each item, int64 [num_items]; 0 for row 0.
        valid, test: the held-out targets.
        source: description of the log.
        left_out: by reason, the number of rows of the log that were left out.
        actions: id of each interaction's action, int64 [N], 0 = missing; None without actions.
        content: ids of items' features, int64 [F, num_items], 0 = missing.
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
    actions: np.ndarray | None = None
    content: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def held_out(self, split: str) -> HeldOut:
        """Return the targets of ``"valid"`` or ``"test"``; raises InvalidInputError otherwise."""
        if split not in ("valid", "test"):
            raise InvalidInputError("no such targets", "split", split, "valid or test",
                                    "choose one of the two held-out parts")
        return self.valid if split == "valid" else self.test

    def digest(self) -> str:
        """Return 12 hexadecimal digits that identify the contents of all arrays."""
        found = hashlib.sha256()
        for part in (self, self.valid, self.test):
            for x in (getattr(part, f.name) for f in fields(part)):
                if isinstance(x, np.ndarray):
                    found.update(np.ascontiguousarray(x).data)
        return found.hexdigest()[:12]

    def training_rows(self) -> np.ndarray:
        """Return the indices of all training rows, int64 [M], ascending."""
        at = np.arange(self.users.size)
        return at[at < self.train_stop[self.users]]

    def popularity(self) -> np.ndarray:
        """Count the training interactions of each item, int64 [num_items]; descending from id 1."""
        return np.bincount(self.items[self.training_rows()], minlength=self.num_items)

    def rows_between(self, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Concatenate row indices of K ranges ``first[k]:last[k]``, [L]; and their lengths [K]."""
        return places_of(first, last - first), last - first


def load_interactions(path: str | os.PathLike[str], options: DataOptions | None = None
                      ) -> Interactions:
    """Load the interactions of all parts of a folder that ``oper preprocess`` wrote.

    Rows whose user or item is missing or has id 0 in the folder (rare or unseen) are left out and
    counted; preprocess with ``--min-count 1 --valid 0 --test 0`` to leave out only missing ones.

    Args:
        path: the folder.
        options: columns, filters and protocol; None = the defaults.

    Raises:
        FileFormatError: the folder is not a preprocessed one, or damaged.
        InvalidInputError: a column is unsuitable, the log has no times, or no interactions are
            left.
    """
    options = options or DataOptions()
    folder = Folder.open(path)
    what = f"cannot read interactions from {os.fspath(path)!r}"
    single = [name for name in folder.sparse if name not in folder.multi_hot]
    features = (*filter(None, (options.action,)), *options.content)
    for key, names in (("user", (options.user,)), ("item", (options.item,)),
                       ("basket", filter(None, (options.basket,))),
                       ("action", filter(None, (options.action,))), ("content", options.content)):
        for name in names:
            if name not in single:
                raise InvalidInputError(what, "column", name, f"one of {single}",
                                        f"set interactions.{key}")
    if not folder.time:
        raise InvalidInputError(what, "time column", None, "a log with times",
                                "name the log's time column in its recipe")
    columns = folder.read_columns(tuple(filter(None, (
        options.user, options.item, folder.label, folder.time, options.basket, *features))))

    def known(name: str) -> np.ndarray:
        ids = columns[name].astype(np.int64)
        # Missing fields may have a row of their own in the folder; here they count as missing.
        return np.where(ids == folder.missing_ids[name], 0, ids)

    log = Log(known(options.user), known(options.item), columns[folder.label].astype(np.float32),
              columns[folder.time].astype(np.int64),
              known(options.basket) if options.basket else None,
              np.stack([known(name) for name in features], axis=1) if features else None)
    recipe = folder.manifest.get("recipe", {}).get("name", "?")
    return from_log(log, options, f"recipe {recipe}")


def from_log(log: Log, options: DataOptions, source: str = "") -> Interactions:
    """Make interactions from rows in any order; see `Log` and `DataOptions`.

    Raises:
        InvalidInputError: no interactions or no training users are left, rewards are not finite,
            or the protocol needs baskets and the log has none.
    """
    left_out = {}
    num_features = bool(options.action) + len(options.content)
    if num_features != (0 if log.features is None else log.features.shape[1]):
        raise InvalidInputError("cannot read features of a log", "columns of Log.features", None
                                if log.features is None else log.features.shape[1],
                                f"{num_features}: the action, if any, and the content",
                                "pass them, or change interactions.action and .content")
    with np.errstate(all="ignore"):
        log = log._replace(rewards=(
            (log.rewards - options.reward_offset) / options.reward_scale).astype(np.float32))
    if not np.isfinite(log.rewards).all():
        raise InvalidInputError("cannot compute rewards", "reward_offset, reward_scale",
                                (options.reward_offset, options.reward_scale),
                                "finite rewards (label - reward_offset) / reward_scale in float32",
                                "change them in the section [interactions], or the labels")

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
        raise InvalidInputError("no interactions are left", "rows left out", left_out,
                                "fewer than all rows",
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
    return replace(_numbered(log, cut, ranks[0], ranks[1], bool(options.action)),
                   item_ids=item_ids, source=source, left_out=left_out,
                   content=_content(log, options, ranks[1]))


def _content(log: Log, options: DataOptions, item_id: np.ndarray) -> np.ndarray:
    """Return `Interactions.content`; raises InvalidInputError if rows of an item differ."""
    found = np.zeros((len(options.content), item_id.size + 1), np.int64)
    if log.features is not None:
        features = log.features[:, log.features.shape[1] - len(options.content):].T
        found[:, item_id[log.items]] = features
        for name, ids, wanted in zip(options.content, found[:, item_id[log.items]], features,
                                     strict=True):
            num_other = int((ids != wanted).sum())
            if num_other:
                raise InvalidInputError("cannot describe items by a column", "column", name,
                                        "one value in all rows of an item; other values in "
                                        f"{num_other} rows", "leave it out of interactions.content")
    return found


def _baskets_of(log: Log) -> np.ndarray:
    """Return the basket of each row, int64 [N]; raises InvalidInputError without baskets."""
    if log.baskets is None:
        raise InvalidInputError("cannot hold out baskets", "baskets of the log", None,
                                "an id per row", "pass a Log with baskets")
    return log.baskets


def _by_basket(log: Log) -> np.ndarray:
    """Return row indices int64 [N] that make the rows of each basket adjacent, baskets in the order
    of their first rows; the log is ordered by user."""
    pairs = np.stack([log.users, _baskets_of(log)])
    _, first, basket = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    return np.argsort(first[basket.reshape(-1)], kind="stable")


def _first_of_pairs(log: Log) -> np.ndarray:
    """Whether each row is the first one with its user and item, bool [N]."""
    order = np.lexsort((log.items, log.users))
    pairs = np.stack([log.users[order], log.items[order]])
    new = np.ones(order.size, bool)
    new[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
    first = np.zeros(order.size, bool)
    first[order[new]] = True
    return first


def _core(log: Log, options: DataOptions) -> np.ndarray:
    """Return the k-core, bool [N]: the most rows in which all users and items reach the minimum."""
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
    """Draw validation and test users; returns the masks of their rows, bool [2, N]."""
    _, users = np.unique(log.users, return_inverse=True)
    num_users = int(users.max(initial=-1)) + 1
    counts = [int(n if n >= 1 else n * num_users) for n in (options.valid, options.test)]
    if num_users and sum(counts) >= num_users:
        raise InvalidInputError("cannot hold out users", "interactions.valid and .test",
                                (options.valid, options.test),
                                f"fewer than all {num_users} users together", "hold out fewer")
    order = np.random.default_rng((options.seed, 0)).permutation(num_users)
    drawn = np.zeros((2, num_users), bool)
    drawn[0, order[:counts[0]]] = drawn[1, order[counts[0]:sum(counts)]] = True
    return drawn[:, users]


def _fold_in(log: Log, held: np.ndarray, options: DataOptions) -> tuple[Log, _Cut]:
    """Move held-out rows of held-out users to each user's end; returns the rows and their cut.

    Of a user's n rows, ``floor((1 - fold_in) n)`` random ones are held out: none if n is small.
    """
    counts = np.bincount(log.users)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    drawn = np.lexsort((np.random.default_rng((options.seed, 1)).random(log.users.size), log.users))
    place = np.empty(log.users.size, np.int64)  # random rank of each row among its user's rows
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
    """Map old ids 0..K - 1 to 1..K by descending count in the rows `counted`, ties by old id."""
    counts = np.bincount(ids[counted], minlength=int(ids.max()) + 1)
    rank = np.empty(counts.size, np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(1, counts.size + 1)
    return rank


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Row indices at which each user's training data and validation and test histories end, int64
    [U] each; and masks of the validation and test targets, bool [N] each."""

    train_stop: np.ndarray
    stops: tuple[np.ndarray, np.ndarray]
    targets: tuple[np.ndarray, np.ndarray]

    @staticmethod
    def of(log: Log, options: DataOptions) -> _Cut:
        num_users = int(log.users[-1]) + 1
        offsets = np.concatenate([[0], np.cumsum(np.bincount(log.users, minlength=num_users))])
        if options.protocol == "time":
            return _Cut._at_times(log, options, offsets)
        at = np.arange(log.users.size)
        # Rankings leave out the history, so an item of the history could never be hit as a target.
        wanted = (log.rewards > 0) & _first_of_pairs(log)
        begins = at  # first row of each held-out unit, which is a row or a basket
        if options.protocol == "leave_last_baskets":
            new = np.ones(at.size, bool)
            new[1:] = (np.diff(log.users) != 0) | (np.diff(_baskets_of(log)) != 0)
            begins = np.maximum.accumulate(np.where(new, at, 0))
        points = np.unique(begins[wanted])
        ends = np.cumsum(np.bincount(log.users[points], minlength=num_users))
        has_two = np.diff(ends, prepend=0) >= 2
        stops = [np.zeros(num_users, np.int64) for _ in range(2)]
        for back, stop in zip((2, 1), stops, strict=True):
            stop[has_two] = points[ends[has_two] - back]
        # A user without interactions before its validation targets is only used for training.
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
            new = _first_of_pairs(log)  # targets must not be in the history nor repeat
            mask = new & (log.rewards > 0) & (at >= stop[log.users]) & (at < end[log.users])
            targets.append(mask & (stop > offsets[:-1])[log.users])
        return _Cut(stops[0], (stops[0], stops[1]), (targets[0], targets[1]))


def _numbered(log: Log, cut: _Cut, user_id: np.ndarray, item_id: np.ndarray, has_actions: bool
              ) -> Interactions:
    """Renumber users and items and order rows by new user id; leaves `item_ids` empty."""
    num_users = user_id.size + 1
    old_offsets = np.concatenate([[0], np.cumsum(np.bincount(log.users))])
    users = user_id[log.users]
    order = np.argsort(users, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(users, minlength=num_users))])
    moved = np.zeros(num_users, np.int64)  # by new user: new row index minus old one
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
        held[1],
        actions=log.features[order, 0] if has_actions and log.features is not None else None)
