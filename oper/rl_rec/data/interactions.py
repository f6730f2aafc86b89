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
# Protocols, and the options with their defaults that only these protocols have.
_PROTOCOL_OPTIONS = ((PROTOCOLS[2:], {"valid": 0.1, "test": 0.1}),
                     (PROTOCOLS[3:], {"fold_in": 0.8, "seed": 0}))


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How a log becomes interactions, and which of them are held out.

    Attributes:
        user, item: names of the folder's sparse columns of users and items.
        k_core: minimum number of interactions per user and item, reached by repeated removal.
        item_core: the minimum for items, if it differs from that for users; 0 = `k_core`.
        only: ``"positive"``: interactions with reward <= 0 are removed first; ``"all"``: they are
            part of the history.
        protocol: which interactions are held out. ``"leave_last_two"``: the last two positive
            interactions of a user are its validation and its test target; the interactions before
            them are for training. ``"leave_last_baskets"``: the same with a user's last two baskets
            that contain a positive item not in earlier baskets; all such items are targets. For
            logs in which several rows have one time, so that rows within a basket have no order.
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
             f"a share between 0 and 1 - valid = {1 - self.valid:g}"),
            *((name, self.protocol in protocols or getattr(self, name) == default,
               f"{default}, its default, unless protocol is {' or '.join(map(repr, protocols))}")
              for protocols, defaults in _PROTOCOL_OPTIONS for name, default in defaults.items()))


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
    """N rows of a log, in its order.

    Attributes:
        users, items: ids int64 [N], <= 0 = missing.
        rewards: float32 [N]; labels before `from_log` converts them.
        times: int64 [N], seconds since 1970.
        baskets: ids int64 [N], <= 0 = missing; None = no baskets.
        actions: ids of the interactions' kinds, int64 [N], 0 = missing; None = no kinds.
        content: ids of the items' features, int64 [N, F], 0 = missing; None = no features.
    """

    users: np.ndarray
    items: np.ndarray
    rewards: np.ndarray
    times: np.ndarray
    baskets: np.ndarray | None = None
    actions: np.ndarray | None = None
    content: np.ndarray | None = None

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
        numbering: 12 hexadecimal digits that identify which users and items have which ids; empty
            = ids have no other meaning.
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
    numbering: str = ""

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

    def popularity(self, positive: bool = False) -> np.ndarray:
        """Count the training interactions of each item, int64 [num_items]; from id 1 on, items with
        more interactions come first. With `positive`, count only positive interactions, whose
        numbers are in no order."""
        rows = self.training_rows()
        if positive:
            rows = rows[self.rewards[rows] > 0]
        return np.bincount(self.items[rows], minlength=self.num_items)

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
    optional = (("basket", options.basket), ("action", options.action),
                *(("content", name) for name in options.content))
    chosen = [("user", options.user), ("item", options.item), *(x for x in optional if x[1])]
    for key, name in chosen:
        if name not in single:
            raise InvalidInputError(what, "column", name, f"one of {single}",
                                    f"set interactions.{key}")
    if not folder.time:
        raise InvalidInputError(what, "time column", None, "a log with times",
                                "name the log's time column in its recipe")
    columns = folder.read_columns((folder.label, folder.time, *(name for _, name in chosen)))

    def known(name: str) -> np.ndarray:
        ids = columns[name].astype(np.int64)
        # Missing fields may have a row of their own in the folder; here they count as missing.
        return np.where(ids == folder.missing_ids[name], 0, ids)

    log = Log(known(options.user), known(options.item), columns[folder.label].astype(np.float32),
              columns[folder.time].astype(np.int64),
              known(options.basket) if options.basket else None,
              known(options.action) if options.action else None,
              np.stack([known(n) for n in options.content], 1) if options.content else None)
    recipe = folder.manifest.get("recipe", {}).get("name", "?")
    return from_log(log, options, f"recipe {recipe}")


def from_log(log: Log, options: DataOptions, source: str = "") -> Interactions:
    """Make interactions from rows in any order; see `Log` and `DataOptions`.

    Raises:
        InvalidInputError: no interactions or no training users are left, rewards are not finite,
            or the protocol needs baskets and the log has none.
    """
    left_out = {}
    given = (log.actions is not None, 0 if log.content is None else log.content.shape[1])
    if given != (bool(options.action), len(options.content)):
        raise InvalidInputError(
            "cannot read features of a log", "whether Log has actions, columns of Log.content",
            given, f"{bool(options.action), len(options.content)} as in the options",
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
    raw_users, users = np.unique(log.users, return_inverse=True)
    raw_items, items = np.unique(log.items, return_inverse=True)
    log = log._replace(users=users, items=items)
    if options.protocol == "held_out_users":
        log, cut = _fold_in(log, held, options)
    else:
        cut = _Cut.of(log, options)
    ranks = [_by_count(ids, cut.is_training) for ids in (users, items)]
    user_ids, item_ids = (np.zeros(raw.size + 1, np.int64) for raw in (raw_users, raw_items))
    user_ids[ranks[0]], item_ids[ranks[1]] = raw_users, raw_items
    numbering = hashlib.sha256(user_ids.tobytes() + item_ids.tobytes()).hexdigest()[:12]
    return replace(_numbered(log, cut, ranks[0], ranks[1]), item_ids=item_ids, source=source,
                   left_out=left_out, content=_content(log, options, ranks[1]),
                   numbering=numbering)


def _content(log: Log, options: DataOptions, item_id: np.ndarray) -> np.ndarray:
    """Return `Interactions.content`; raises InvalidInputError if rows of an item differ."""
    found = np.zeros((len(options.content), item_id.size + 1), np.int64)
    if log.content is not None:
        items = item_id[log.items]
        found[:, items] = log.content.T
        for name, ids, wanted in zip(options.content, found[:, items], log.content.T, strict=True):
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
    """Draw the rows of held-out users that are not history, and move them to each user's end.

    Of such a user's n rows, ``floor((1 - fold_in) n)`` are drawn: none if n is small.

    Args:
        log: rows ordered by user.
        held: masks of the rows of validation and of test users, bool [2, N].
        options: `fold_in` and the seed.

    Returns:
        The reordered rows and their division.
    """
    counts = np.bincount(log.users)
    offsets = np.cumsum(counts) - counts
    drawn = np.lexsort((np.random.default_rng((options.seed, 1)).random(log.users.size), log.users))
    place = np.empty(log.users.size, np.int64)  # random rank of each row among its user's rows
    place[drawn] = np.arange(log.users.size) - offsets[log.users[drawn]]
    histories = np.ceil(np.round(options.fold_in * counts, 6)).astype(np.int64)
    asked = held.any(axis=0) & (place >= histories[log.users])
    order = np.lexsort((asked, log.users))
    log, held, asked = log.rows(order), held[:, order], asked[order]
    targets = held & asked & (log.rewards > 0) & _first_of_pairs(log)
    return log, _Cut(~(held[0] | held[1]), np.stack([~asked, ~asked]), targets)


def _by_count(ids: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Map old ids 0..K - 1 to 1..K by descending count in the rows `counted`, ties by old id."""
    counts = np.bincount(ids[counted], minlength=int(ids.max()) + 1)
    rank = np.empty(counts.size, np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(1, counts.size + 1)
    return rank


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Division of N rows, ordered by user, into training data, histories and targets.

    Training data and histories are the first rows of each user.

    Attributes:
        is_training: bool [N].
        histories: whether each row is in its user's validation history, and in the test history,
            bool [2, N].
        targets: whether each row is a validation target, and a test target, bool [2, N].
    """

    is_training: np.ndarray
    histories: np.ndarray
    targets: np.ndarray

    @staticmethod
    def of(log: Log, options: DataOptions) -> _Cut:
        """Divide rows ordered by user, then time, by a protocol other than held-out users."""
        # Rankings leave out the history, so an item of the history could never be hit as a target.
        wanted = (log.rewards > 0) & _first_of_pairs(log)
        if options.protocol == "time":
            return _Cut._at_times(log, options, wanted)
        at = np.arange(log.users.size)
        begins = at  # first row of each held-out unit, which is a row or a basket
        if options.protocol == "leave_last_baskets":
            new = np.ones(at.size, bool)
            new[1:] = (np.diff(log.users) != 0) | (np.diff(_baskets_of(log)) != 0)
            begins = np.maximum.accumulate(np.where(new, at, 0))
        points = np.unique(begins[wanted])
        ends = np.cumsum(np.bincount(log.users[points], minlength=int(log.users[-1]) + 1))
        has_two = np.diff(ends, prepend=0) >= 2
        stops = np.zeros((2, ends.size), np.int64)  # by user, first rows of the last two units
        stops[:, has_two] = points[ends[has_two] - 2], points[ends[has_two] - 1]
        # A user without interactions before its validation targets is only used for training.
        asked = (has_two & (stops[0] > np.searchsorted(log.users, np.arange(ends.size))))[log.users]
        stop = stops[:, log.users]
        histories = asked & (at < stop)
        return _Cut(~asked | histories[0], histories, asked & wanted & (begins == stop))

    @staticmethod
    def _at_times(log: Log, options: DataOptions, wanted: np.ndarray) -> _Cut:
        ordered = np.sort(log.times)
        shares = (1 - options.valid - options.test, 1 - options.test)
        points = [ordered[min(ordered.size - 1, int(s * ordered.size))] for s in shares]
        histories = np.stack([log.times < point for point in points])
        periods = np.stack([histories[1] & ~histories[0], ~histories[1]])
        has_history = np.stack([np.isin(log.users, log.users[h]) for h in histories])
        return _Cut(histories[0], histories, wanted & periods & has_history)


def _numbered(log: Log, cut: _Cut, user_id: np.ndarray, item_id: np.ndarray) -> Interactions:
    """Renumber users and items and order rows by new user id; leaves `item_ids` empty."""
    num_users = user_id.size + 1
    order = np.argsort(user_id[log.users], kind="stable")
    users, items = user_id[log.users][order], item_id[log.items][order]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(users, minlength=num_users))])

    def by_user(mask: np.ndarray) -> np.ndarray:
        return np.bincount(users[mask[order]], minlength=num_users)

    held = []
    for history, is_target in zip(cut.histories, cut.targets, strict=True):
        lengths = by_user(is_target)
        asked = np.flatnonzero(lengths)
        held.append(HeldOut(asked, (offsets[:-1] + by_user(history))[asked],
                            items[is_target[order]], lengths[asked]))
    return Interactions(
        users, items, log.rewards[order], log.times[order], offsets,
        offsets[:-1] + by_user(cut.is_training), num_users, item_id.size + 1,
        np.zeros(0, np.int64), held[0], held[1],
        actions=None if log.actions is None else log.actions[order])
