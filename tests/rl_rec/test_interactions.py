"""Interactions against a plain re-telling of the protocol, user by user."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oper.data import Folder, PreprocessOptions, load_recipe, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.errors import InvalidInputError, OperError
from oper.rl_rec.bandit import BanditColumns, load_bandit
from oper.rl_rec.interactions import (
    DataOptions,
    HeldOut,
    Interactions,
    Log,
    from_log,
    load_interactions,
)
from tests.support import real_data

Row = tuple[int, int, float, int]  # user, item, reward, time
WHOLE = PreprocessOptions(min_count=1, valid="0", test="0")


@st.composite
def logs(draw: st.DrawFn) -> list[Row]:
    """Rows of few users and items, so that cores, repeats and equal times all occur."""
    row = st.tuples(st.integers(0, 6), st.integers(0, 8), st.sampled_from([0.0, 1.0, 1.0]),
                    st.integers(0, 30))
    return draw(st.lists(row, min_size=1, max_size=90))


def retold(rows: list[Row], options: DataOptions) -> dict[int, list[Row]]:
    """What is left of each user, in order of time."""
    rows = sorted((r for r in rows if r[0] and r[1]), key=lambda r: (r[0], r[3]))
    if options.repeats == "first":
        seen: set[tuple[int, int]] = set()
        rows = [r for r in rows if r[:2] not in seen and not seen.add(r[:2])]  # type: ignore[func-returns-value]
    while True:
        users, items = Counter(r[0] for r in rows), Counter(r[1] for r in rows)
        left = [r for r in rows if min(users[r[0]], items[r[1]]) >= options.k_core]
        if left == rows:
            break
        rows = left
    return {u: [r for r in rows if r[0] == u] for u in sorted({r[0] for r in rows})}


def arrays(rows: list[Row]) -> Log:
    users, items, rewards, times = zip(*rows, strict=True)
    return Log(np.array(users), np.array(items), np.array(rewards, np.float32), np.array(times))


def held(data: Interactions, asked: HeldOut) -> dict[int, tuple[int, list[int]]]:
    """Length of the history and targets, by user."""
    ends = np.cumsum(asked.target_lengths)
    return {int(u): (int(s - data.offsets[u]), asked.targets[e - n:e].tolist())
            for u, s, e, n in zip(asked.users, asked.stop, ends, asked.target_lengths, strict=True)}


@settings(max_examples=200, deadline=None)
@given(logs(), st.sampled_from(["leave_last_two", "time"]), st.sampled_from(["first", "keep"]),
       st.integers(1, 3))
def test_the_protocol(rows: list[Row], protocol: str, repeats: str, k_core: int) -> None:
    options = DataOptions(k_core=k_core, protocol=protocol, repeats=repeats, valid=0.2, test=0.2)
    users = retold(rows, options)
    if not users:
        with pytest.raises(InvalidInputError, match="no interactions"):
            from_log(arrays(rows), options)
        return
    data = from_log(arrays(rows), options)
    times = sorted(r[3] for mine in users.values() for r in mine)
    points = [times[min(len(times) - 1, int(s * len(times)))] for s in (1 - 0.2 - 0.2, 1 - 0.2)]
    expected = {}  # user: rows, training length, (history, targets) of both splits
    for user, mine in users.items():
        found: list[tuple[int, list[int]] | None] = [None, None]
        if protocol == "leave_last_two":
            train, positives = len(mine), [k for k, r in enumerate(mine) if r[2] > 0][-2:]
            if len(positives) == 2 and positives[0] > 0:
                train = positives[0]
                found = [(k, [mine[k][1]]) for k in positives]
        else:
            stops = [sum(r[3] < p for r in mine) for p in points]
            train, ends = stops[0], (stops[1], len(mine))
            for s, (stop, end) in enumerate(zip(stops, ends, strict=True)):
                targets: list[int] = []
                for k in range(stop, end):
                    earlier = [r[1] for r in mine[:k]]
                    if mine[k][2] > 0 and mine[k][1] not in earlier:
                        targets.append(mine[k][1])
                if targets and stop:
                    found[s] = (stop, targets)
        expected[user] = (mine, train, found)
    # Users and items keep apart under the new numbers, which go by training count.
    counts = np.bincount(data.users[data.training_rows()], minlength=data.num_users)
    assert (np.diff(counts[1:]) <= 0).all() and (np.diff(data.popularity()[1:]) <= 0).all()
    assert data.num_users == len(users) + 1 and data.users.min() >= 1 <= data.items.min()
    by_count = sorted(users, key=lambda u: (-expected[u][1], u))
    item_counts = Counter(r[1] for mine, train, _ in expected.values() for r in mine[:train])
    every = sorted({r[1] for mine in users.values() for r in mine},
                   key=lambda i: (-item_counts[i], i))
    new_item = {old: k for k, old in enumerate(every, 1)}
    assert data.num_items == len(every) + 1
    assert data.item_ids.tolist() == [0, *every]
    splits = [held(data, data.valid), held(data, data.test)]
    for number, old in enumerate(by_count, 1):
        mine, train, found = expected[old]
        at = slice(data.offsets[number], data.offsets[number + 1])
        assert data.items[at].tolist() == [new_item[r[1]] for r in mine]
        assert data.times[at].tolist() == [r[3] for r in mine]
        assert data.rewards[at].tolist() == [r[2] for r in mine]
        assert data.train_stop[number] - data.offsets[number] == train
        for split, want in zip(splits, found, strict=True):
            got = split.pop(number, None)
            assert got == (want and (want[0], [new_item[i] for i in want[1]]))
    assert splits == [{}, {}]


def test_from_a_preprocessed_log(tmp_path: Path) -> None:
    """Times to the second survive preprocessing, whatever the order of the file."""
    rows = [(u, 100 + (u * 7 + k) % 9, 9 if k % 3 else 4, 1_400_000_000 + 50 * k + u)
            for u in range(1, 12) for k in range(8)]
    log = tmp_path / "ratings.dat"
    log.write_text("".join(f"{u}::{i:07}::{r}::{t}\n" for u, i, r, t in rows[::-1]))
    preprocess(load_recipe("movietweetings"), [str(log)], tmp_path / "data", WHOLE)
    data = load_interactions(tmp_path / "data", DataOptions(k_core=2))
    assert data.source == "recipe movietweetings" and data.left_out["repeats"] == 0
    assert data.users.size == len(rows)
    assert sorted(data.times.tolist()) == sorted(r[3] for r in rows)
    for user in range(1, 12):
        assert (np.diff(data.times[data.offsets[user]:data.offsets[user + 1]]) == 50).all()
    assert data.rewards.sum() == sum(r[2] >= 8 for r in rows)
    for wrong, pattern in ((DataOptions(user="nobody"), "nobody"), (
            DataOptions(k_core=50), "k_core")):
        with pytest.raises(InvalidInputError, match=pattern):
            load_interactions(tmp_path / "data", wrong)
    (part,) = (tmp_path / "data" / "train").glob("*.parquet")
    good, refused = part.read_bytes(), 0
    for at in range(4, len(good), len(good) // 40):
        part.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1:])
        try:
            load_interactions(tmp_path / "data")
        except OperError:
            refused += 1
    assert refused > 20, "most of the file is pages with checksums"


def test_a_log_without_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,y\n" + "1,2,1\n3,4,0\n" * 5)
    recipe = generic_recipe("csv", Choice(["user", "item"], "y", [], None, "unix", ","))
    preprocess(recipe, [str(tmp_path / "log.csv")], tmp_path / "data", WHOLE)
    with pytest.raises(InvalidInputError, match="time"):
        load_interactions(tmp_path / "data")


def test_options_are_checked() -> None:
    for bad in ({"k_core": 0}, {"protocol": "x"}, {"repeats": "last"}, {"valid": 0.6, "test": 0.5}):
        with pytest.raises(InvalidInputError, match=next(iter(bad))):
            DataOptions(**bad)  # type: ignore[arg-type]
    data = from_log(Log(np.ones(3, int), np.arange(1, 4), np.ones(3, np.float32), np.arange(3)),
                    DataOptions(k_core=1))
    with pytest.raises(InvalidInputError, match="valid or test"):
        data.held_out("train")


@pytest.mark.parametrize("min_count", [1, 3])
@pytest.mark.parametrize("hashed", [None, 50])
def test_missing_users_and_items_are_nobody(
    tmp_path: Path, min_count: int, hashed: int | None
) -> None:
    """Rows without a user would make one busy user of all of them."""
    rows = [(f"u{k % 3}", f"i{k % 5}", 1, 100 + k) for k in range(30)]
    rows += [("", f"i{k % 5}", 1, 200 + k) for k in range(40)]
    rows += [(f"u{k % 3}", "", 1, 300 + k) for k in range(50)]
    (tmp_path / "log.csv").write_text("user,item,y,t\n" + "".join(
        ",".join(map(str, row)) + "\n" for row in rows))
    recipe = generic_recipe("csv", Choice(["user", "item"], "y", [], "t"))
    preprocess(recipe, [str(tmp_path / "log.csv")], tmp_path / "data", PreprocessOptions(
        min_count=min_count, hash_rows=hashed, valid="0", test="0"))
    folder = Folder.open(tmp_path / "data")
    assert folder.missing_ids == ({"user": 0, "item": 0} if hashed else {"user": 1, "item": 1})
    data = load_interactions(tmp_path / "data", DataOptions(k_core=1, repeats="keep"))
    assert data.left_out["without user or item"] == 90
    assert data.users.size == 30
    assert data.num_users <= 3 + 1 and data.num_items <= 5 + 1


def test_online_retail_without_the_rows_of_no_customer(tmp_path: Path) -> None:
    source = real_data("online_retail/online_retail.csv.gz")
    preprocess(load_recipe("online-retail"), [str(source)], tmp_path / "data", WHOLE)
    data = load_interactions(tmp_path / "data", DataOptions("CustomerID", "StockCode"))
    assert data.left_out["without user or item"] == 135_080
    assert (data.num_users - 1, data.num_items - 1, data.users.size) == (4087, 3154, 265_832)


def test_movietweetings(tmp_path: Path) -> None:
    source = real_data("movietweetings_142k/ratings.dat.gz")
    preprocess(load_recipe("movietweetings"), [str(source)], tmp_path / "data", WHOLE)
    data = load_interactions(tmp_path / "data")
    assert data.users.size + sum(data.left_out.values()) == 141_695
    counts = np.bincount(data.users), np.bincount(data.items)
    assert min(counts[0][1:].min(), counts[1][1:].min()) >= 5
    assert data.test.users.size > 1000


def test_open_bandit(tmp_path: Path) -> None:
    source = real_data("open_bandit/bts/women/women.csv.gz")
    preprocess(load_recipe("open-bandit"), [str(source)], tmp_path / "data", WHOLE)
    log = load_bandit(tmp_path / "data")
    assert (log.actions.size, log.num_actions, log.num_positions) == (10_000, 46, 3)
    assert log.context.shape == (10_000, 4)
    assert 1e-7 < log.propensities.min() < log.propensities.max() < 0.97
    assert log.rewards.sum() == pytest.approx(46, abs=10)
    for wrong in (BanditColumns(action="x"), BanditColumns(propensity="x")):
        with pytest.raises(InvalidInputError, match="column"):
            load_bandit(tmp_path / "data", wrong)
