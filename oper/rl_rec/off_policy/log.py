"""Logged bandit feedback with propensities, for off-policy estimates."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np

from oper.data import Folder
from oper.errors import InvalidInputError


@dataclass(frozen=True, slots=True, eq=False)
class LoggedBandit:
    """N impressions with the propensities of the shown items, as in the Open Bandit data set.

    Attributes:
        context: ids of the context known before the choice, int64 [N, C].
        actions: the shown item, int64 [N], in 0..num_actions-1.
        positions: the position at which it was shown, int64 [N], in 0..num_positions-1.
        rewards: float32 [N], 1 = clicked.
        propensities: probability under the logging policy of this action at this position,
            float64 [N], in (0, 1].
        num_actions: number of distinct actions.
        num_positions: number of distinct positions.
        context_rows: number of ids of each context column.
        action_groups: group of each action, such as its category, int64 [num_actions], >= 0; None =
            not known.
    """

    context: np.ndarray
    actions: np.ndarray
    positions: np.ndarray
    rewards: np.ndarray
    propensities: np.ndarray
    num_actions: int
    num_positions: int
    context_rows: tuple[int, ...]
    action_groups: np.ndarray | None = None

    def rows(self, chosen: np.ndarray) -> LoggedBandit:
        """Select rows by indices int64 [M] or a mask bool [N]; actions and positions are kept."""
        return replace(self, context=self.context[chosen], actions=self.actions[chosen],
                       positions=self.positions[chosen], rewards=self.rewards[chosen],
                       propensities=self.propensities[chosen])


@dataclass(frozen=True, slots=True)
class BanditColumns:
    """Names of a folder's columns; all other sparse columns are context.

    Attributes:
        action: sparse column of the shown item.
        propensity: dense column of its probability, which must not be transformed.
        position: sparse column of its position; empty = there is only one position.
        group: sparse column of its group; empty = no groups.
    """

    action: str = "item_id"
    propensity: str = "propensity_score"
    position: str = "position"
    group: str = ""


def load_bandit(path: str | os.PathLike[str], columns: BanditColumns | None = None
                ) -> LoggedBandit:
    """Load all parts of a log from a folder that ``oper preprocess`` wrote.

    Args:
        path: the folder.
        columns: names of its columns; None = those of the recipe ``open-bandit``.

    Raises:
        FileFormatError: the folder is not a preprocessed one, or damaged.
        InvalidInputError: a column is missing or transformed, the log is empty, a propensity is
            not in (0, 1], or an action has several groups.
    """
    names = columns or BanditColumns()
    folder = Folder.open(path)
    what = f"cannot read logged feedback from {os.fspath(path)!r}"
    sparse = [n for n in folder.sparse if n not in folder.multi_hot]
    for name, among in ((names.action, sparse), (names.propensity, folder.dense),
                        *((name, sparse) for name in (names.position, names.group) if name)):
        if name not in among:
            raise InvalidInputError(what, "column", name, f"one of {list(among)}",
                                    "name the log's column")
    transform = folder.manifest.get("dense_transforms", {}).get(names.propensity, "none")
    if transform != "none":
        raise InvalidInputError(what, f"transform of {names.propensity}", transform, "none",
                                'set transform = "none" in the recipe')
    context = [n for n in sparse if n not in (names.action, names.position, names.group)]
    found = folder.read_columns((folder.label, names.propensity, *sparse))
    propensities = found[names.propensity].astype(np.float64)
    if not propensities.size:
        raise InvalidInputError(what, "rows", 0, "at least one", "preprocess a log with rows")
    bad = np.flatnonzero(~((propensities > 0) & (propensities <= 1)))
    if bad.size:
        raise InvalidInputError(what, f"{names.propensity} of row {bad[0]}",
                                float(propensities[bad[0]]), "in (0, 1]", "correct the log")
    rows = dict(zip(folder.sparse, folder.num_rows, strict=True))
    num_rows = len(propensities)
    # Id 0, shared by rare and missing values, counts as an action only if it occurs.
    actions, num_actions = without_gap(found[names.action])
    positions, num_positions = (without_gap(found[names.position]) if names.position
                                else (np.zeros(num_rows, np.int64), 1))
    ids = (np.stack([found[n] for n in context], axis=1).astype(np.int64) if context
           else np.zeros((num_rows, 0), np.int64))
    return LoggedBandit(ids, actions, positions, found[folder.label].astype(np.float32),
                        propensities, num_actions, num_positions,
                        tuple(rows[n] for n in context),
                        _groups_of(actions, found[names.group], what) if names.group else None)


def _groups_of(actions: np.ndarray, groups: np.ndarray, what: str) -> np.ndarray:
    """Return each action's group, renumbered from 0; raises InvalidInputError if it varies."""
    _, first = np.unique(actions, return_index=True)
    differs = groups != groups[first][actions]
    if differs.any():
        raise InvalidInputError(what, f"groups of action {actions[differs][0]}",
                                np.unique(groups[actions == actions[differs][0]])[:8].tolist(),
                                "one group in all rows", "name a column that belongs to the item")
    return without_gap(groups[first])[0]


def without_gap(ids: np.ndarray) -> tuple[np.ndarray, int]:
    """Renumber ids to 0..K - 1 in the same order; returns them, int64, and K."""
    values, numbers = np.unique(ids, return_inverse=True)
    return numbers.astype(np.int64), int(values.size)
