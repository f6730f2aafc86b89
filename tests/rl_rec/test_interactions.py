"""Interactions against a simple implementation of each protocol, user by user."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oper.data import Folder, PreprocessOptions, load_recipe, preprocess
from oper.data.generic import Choice, generic_recipe
from oper.data.recipe import Column
from oper.errors import InvalidInputError, OperError
from oper.rl_rec.data.interactions import (
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
    """Rows of few users and items, so that cores, repeats and equal times all occur. All numbers of
    rows are equally likely; lists of a drawn length would mostly have about six."""
    row = st.tuples(st.integers(0, 6), st.integers(0, 8), st.sampled_from([0.0, 1.0, 1.0]),
                    st.integers(0, 30))
    size = draw(st.integers(1, 90))
    return draw(st.lists(row, min_size=size, max_size=size))


def retold(rows: list[Row], options: DataOptions) -> dict[int, list[Row]]:
    """Return the remaining rows of each user, in order of time."""
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
    """Return the length of the history and the targets of each user."""
    ends = np.cumsum(asked.target_lengths)
    return {int(u): (int(s - data.offsets[u]), asked.targets[e - n:e].tolist())
            for u, s, e, n in zip(asked.users, asked.stop, ends, asked.target_lengths, strict=True)}


# A user's rows, number of training rows, and history length and targets in both splits.
Told = tuple[list[Row], int, list[tuple[int, list[int]] | None]]


def check_users(data: Interactions, expected: dict[int, Told]) -> None:
    """Check users' items, histories and targets, and the order of user ids."""
    splits = [held(data, data.valid), held(data, data.test)]
    for number, old in enumerate(sorted(expected, key=lambda u: (-expected[u][1], u)), 1):
        mine, train, found = expected[old]
        first, stop = data.offsets[number], data.offsets[number + 1]
        assert data.item_ids[data.items[first:stop]].tolist() == [r[1] for r in mine]
        assert data.rewards[first:stop].tolist() == [r[2] for r in mine]
        assert data.train_stop[number] - first == train
        for split, want in zip(splits, found, strict=True):
            got = split.pop(number, None)
            assert (got and (got[0], data.item_ids[got[1]].tolist())) == want
    assert splits == [{}, {}]


@settings(max_examples=100, deadline=None)
@given(logs(), st.sampled_from(["leave_last_two", "time"]), st.sampled_from(["first", "keep"]),
       st.integers(1, 3))
def test_the_protocol(rows: list[Row], protocol: str, repeats: str, k_core: int) -> None:
    shares = {"valid": 0.2, "test": 0.2} if protocol == "time" else {}
    options = DataOptions(k_core=k_core, protocol=protocol, repeats=repeats, **shares)
    users = retold(rows, options)
    if not users:
        with pytest.raises(InvalidInputError, match="no interactions"):
            from_log(arrays(rows), options)
        return
    data = from_log(arrays(rows), options)
    times = sorted(r[3] for mine in users.values() for r in mine)
    points = [times[min(len(times) - 1, int(s * len(times)))] for s in (1 - 0.2 - 0.2, 1 - 0.2)]
    expected: dict[int, Told] = {}
    for user, mine in users.items():
        found: list[tuple[int, list[int]] | None] = [None, None]
        if protocol == "leave_last_two":
            train, positives = len(mine), [
                k for k, r in enumerate(mine)
                if r[2] > 0 and r[1] not in [earlier[1] for earlier in mine[:k]]][-2:]
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
    # Users and items are renumbered one to one, by training count.
    counts = np.bincount(data.users[data.training_rows()], minlength=data.num_users)
    assert (np.diff(counts[1:]) <= 0).all() and (np.diff(data.popularity()[1:]) <= 0).all()
    assert data.num_users == len(users) + 1 and data.users.min() >= 1 <= data.items.min()
    item_counts = Counter(r[1] for mine, train, _ in expected.values() for r in mine[:train])
    every = sorted({r[1] for mine in users.values() for r in mine},
                   key=lambda i: (-item_counts[i], i))
    assert data.num_items == len(every) + 1
    assert data.item_ids.tolist() == [0, *every]
    check_users(data, expected)
    by_count = sorted(users, key=lambda u: (-expected[u][1], u))
    assert data.times.tolist() == [r[3] for u in by_count for r in expected[u][0]]


@settings(max_examples=100, deadline=None)
@given(logs(), st.integers(1, 3), st.integers(1, 2), st.sampled_from(["all", "positive"]),
       st.integers(0, 3))
def test_held_out_users(rows: list[Row], k_core: int, item_core: int, only: str, seed: int
                        ) -> None:
    """Held-out users are not in the training data, and their targets are not in their histories."""
    options = DataOptions(k_core=k_core, item_core=item_core, only=only, seed=seed, valid=0.25,
                          test=0.25, protocol="held_out_users", fold_in=0.6)
    try:
        data = from_log(arrays(rows), options)
    except InvalidInputError as error:
        assert "no interactions" in str(error)
        return
    trained = set(data.items[data.training_rows()].tolist())
    assert set(data.items.tolist()) <= trained
    valid, test = held(data, data.valid), held(data, data.test)
    assert not valid.keys() & test.keys()
    if only == "positive":
        assert (data.rewards > 0).all()
    for user in range(1, data.num_users):
        at = slice(data.offsets[user], data.offsets[user + 1])
        mine, count = data.items[at].tolist(), data.offsets[user + 1] - data.offsets[user]
        trains = data.train_stop[user] - data.offsets[user]
        assert trains in (0, count)
        given, targets = (valid | test).get(user, (0, []))
        if trains:
            assert not targets and (np.diff(data.times[at]) >= 0).all()
        elif targets:
            assert given == -(-6 * count // 10) and set(targets) <= set(mine[given:])
            assert not set(targets) & set(mine[:given])
            assert (np.diff(data.times[at][:given]) >= 0).all()
            liked = {i for i, r in zip(mine[given:], data.rewards[at][given:], strict=True) if r}
            assert set(targets) == liked
    again = from_log(arrays(rows), options)
    assert np.array_equal(again.items, data.items)


def test_shares_and_numbers_of_held_out_users() -> None:
    log = arrays([(u, i, 1.0, 10 * i) for u in range(1, 41) for i in range(1, 11)])
    options = DataOptions(protocol="held_out_users", only="positive")
    for share, users in ((0.1, 4), (5, 5)):
        data = from_log(log, replace(options, valid=share, test=share))
        assert data.valid.users.size == data.test.users.size == users
        assert (data.valid.target_lengths == 2).all()  # a fifth of ten
        assert data.training_rows().size == 10 * (40 - 2 * users)
    drawn = {tuple(from_log(log, replace(options, seed=s)).test.targets) for s in range(3)}
    assert len(drawn) > 1
    with pytest.raises(InvalidInputError, match="hold out fewer"):
        from_log(log, replace(options, valid=20, test=20))


Bought = tuple[int, int, float, int, int]  # user, item, reward, time, basket


@st.composite
def purchases(draw: st.DrawFn) -> list[Bought]:
    """Draw rows of a few users, with baskets that last, begin at the same time or overlap."""
    row = st.tuples(st.integers(0, 4), st.integers(0, 8), st.sampled_from([0.0, 1.0, 1.0]),
                    st.integers(0, 12), st.integers(0, 6))
    size = draw(st.integers(1, 70))
    return draw(st.lists(row, min_size=size, max_size=size))


def with_baskets(rows: list[Bought]) -> Log:
    return Log(*arrays([r[:4] for r in rows])[:4], np.array([r[4] for r in rows]))


@settings(max_examples=100, deadline=None)
@given(purchases(), st.sampled_from(["first", "keep"]), st.integers(1, 3))
def test_the_last_baskets(rows: list[Bought], repeats: str, k_core: int) -> None:
    """A basket is one event at the time of its first row; its new positive items are targets, and
    none of its rows is history."""
    options = DataOptions(k_core=k_core, protocol="leave_last_baskets", basket="b",
                          repeats=repeats)
    whole = [r for r in rows if r[0] and r[1] and r[4]]
    ordered: list[Bought] = []
    for user in sorted({r[0] for r in whole}):
        mine = sorted((r for r in whole if r[0] == user), key=lambda r: r[3])
        for basket in dict.fromkeys(r[4] for r in mine):
            ordered += [r for r in mine if r[4] == basket]
    basket_of = dict(enumerate(ordered))
    # Indices replace times: `retold` leaves rows out and keeps their order.
    users = retold([(*r[:3], at) for at, r in enumerate(ordered)], options)
    if not users:
        with pytest.raises(InvalidInputError, match="no interactions"):
            from_log(with_baskets(rows), options)
        return
    data = from_log(with_baskets(rows), options)
    assert data.left_out["without basket"] == sum(r[0] > 0 < r[1] and not r[4] for r in rows)
    expected: dict[int, Told] = {}
    for user, rest in users.items():
        items, baskets = [r[1] for r in rest], [basket_of[r[3]][4] for r in rest]
        new = [r[2] > 0 and r[1] not in items[:k] for k, r in enumerate(rest)]
        last = list(dict.fromkeys(b for b, n in zip(baskets, new, strict=True) if n))[-2:]
        stops: list[int] = [baskets.index(b) for b in last]
        found: list[tuple[int, list[int]] | None] = [None, None]
        if len(last) == 2 and stops[0]:
            found = [(stop, [i for i, b, n in zip(items, baskets, new, strict=True)
                             if n and b == basket])
                     for stop, basket in zip(stops, last, strict=True)]
        expected[user] = (rest, stops[0] if found[0] else len(rest), found)
    check_users(data, expected)


def test_lines_of_an_invoice_are_held_out_together(tmp_path: Path) -> None:
    """The log has five products per invoice; a split must not separate them."""
    lines = ["InvoiceNo,StockCode,Description,Quantity,InvoiceDate,UnitPrice,CustomerID,Country"]
    lines += [f"{100 * c + v},{10 * v + k},x,1,2011-0{v}-01 08:2{k // 3}:00,2.5,{c}.0,UK"
              for c in range(1, 7) for v in range(1, 5) for k in range(5)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    recipe = load_recipe("online-retail")
    with_invoices = replace(recipe, layouts=tuple(replace(layout, columns=(
        *layout.columns, Column("InvoiceNo", "sparse", "string"))) for layout in recipe.layouts))
    preprocess(with_invoices, [str(tmp_path / "log.csv")], tmp_path / "data", WHOLE)
    data = load_interactions(tmp_path / "data", DataOptions(
        user="CustomerID", item="StockCode", protocol="leave_last_baskets", basket="InvoiceNo"))
    for split, history in ((data.valid, 10), (data.test, 15)):
        assert split.target_lengths.tolist() == [5] * 6
        assert (split.stop - data.offsets[split.users]).tolist() == [history] * 6
    assert data.training_rows().size == 60 and data.left_out["without basket"] == 0
    with pytest.raises(InvalidInputError, match=r"no invoice.*interactions\.basket"):
        load_interactions(tmp_path / "data", DataOptions(
            user="CustomerID", item="StockCode", protocol="leave_last_baskets",
            basket="no invoice"))
    with pytest.raises(InvalidInputError, match="baskets"):
        from_log(arrays([(1, 1, 1.0, 0)]), DataOptions(protocol="leave_last_baskets", basket="b"))


def test_from_a_preprocessed_log(tmp_path: Path) -> None:
    """Preprocessing keeps times to the second, for any order of the file."""
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
    for bad in ({"k_core": 0}, {"protocol": "x"}, {"basket": "invoice"}, {"repeats": "last"},
                {"valid": 0.6, "test": 0.5}, {"valid": 3, "test": 3}, {"only": "some"},
                {"item_core": -1}, {"fold_in": 1.0}, {"seed": -1},
                # Options that the protocol does not have.
                {"valid": 0.2}, {"test": 0.3}, {"fold_in": 0.5}, {"seed": 3},
                {"fold_in": 0.5, "protocol": "time"}):
        with pytest.raises(InvalidInputError, match=next(iter(bad))):
            DataOptions(**bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="basket=''"):
        DataOptions(protocol="leave_last_baskets")
    data = from_log(Log(np.ones(3, int), np.arange(1, 4), np.ones(3, np.float32), np.arange(3)),
                    DataOptions(k_core=1))
    with pytest.raises(InvalidInputError, match="valid or test"):
        data.held_out("train")


@pytest.mark.parametrize("min_count", [1, 3])
@pytest.mark.parametrize("hashed", [None, 50])
def test_rows_without_user_or_item_are_left_out(tmp_path: Path, min_count: int, hashed: int | None
                                                ) -> None:
    """Otherwise all rows without a user would belong to one user."""
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


def test_online_retail_without_the_rows_that_lack_a_customer(tmp_path: Path) -> None:
    source = real_data("online_retail/online_retail.csv.gz")
    preprocess(load_recipe("online-retail"), [str(source)], tmp_path / "data", WHOLE)
    data = load_interactions(tmp_path / "data", DataOptions("CustomerID", "StockCode"))
    assert data.left_out["without user or item"] == 135_080
    assert (data.num_users - 1, data.num_items - 1, data.users.size) == (4087, 3154, 265_832)
