"""From a log to trained dynamic tables without a vocabulary, alone and in two processes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.cli import main
from oper.data import Folder, SyntheticLog
from oper.data.preprocessing.options import PreprocessOptions
from oper.errors import InvalidInputError, UsageError
from oper.integration.checkpoint.follow import Follower
from oper.rows.capacity import DynamicRows, rows_of_keys
from oper.search import make_problem
from oper.search.cost.model import evaluate
from oper.search.problem.presets import topology_preset
from oper.serve import Client, Request
from oper.serve.model import load_model
from oper.shmem.keys.directories import directory_bytes
from oper.tables import TableSpec
from oper.train.config import TrainConfig
from oper.train.loop import train
from oper.train.model import build_dlrm, load_state
from oper.train.resume import CHECKPOINT
from oper.train.tasks import click_batches
from oper.train.trained import find_weights
from tests.serve_support import bits_of, value_of
from tests.support import announced, check_page, serving, wait_for
from tests.train import test_train
from tests.train.conftest import Prepared, prepare
from tests.train.test_train import run_ranks

PREFIX = "model.sparse_arch.embedding_bag_collection.embedding_bags."


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A preprocessed log of raw ids, and its statistics."""
    return prepare(tmp_path_factory.mktemp("raw"), SyntheticLog(
        6_000, 3, tuple(5 + 20 * k for k in range(26)), effect=2.5),
        PreprocessOptions(raw_ids=True))


def config(raw: Prepared, out: Path, **flags: Any) -> TrainConfig:
    return test_train.config(raw, out, **{"dynamic.rows": 600} | flags)


def train_on(raw: Prepared, out: Path, resume: bool = False, **flags: Any) -> dict[str, Any]:
    return test_train.train_on(raw, out, resume, **{"dynamic.rows": 600} | flags)


def words(raw: Prepared, out: Path, **flags: Any) -> list[str]:
    return test_train.words(raw, out, stats=raw.stats, **{"dynamic.rows": 600} | flags)


def known(out: Path, column: str) -> oper.KeyedRows:
    return oper.KeyedRows.of_entries(load_state(out / "state.pt"), f"{PREFIX}{column}.")


def test_a_log_is_trained_without_a_vocabulary(raw: Prepared, tmp_path: Path) -> None:
    result = train_on(raw, tmp_path)
    assert result["auc"] > 0.6
    folder = Folder.open(raw.folder, allow_raw=True)
    # The first epoch skipped only the rows of the incomplete last batch.
    for name in ("C1", "C13", "C26"):
        seen = {k for part in folder.parts("train")
                for k in folder.read_part(part, (name,)).column(name).to_pylist()}
        held = set(known(tmp_path, name).keys.tolist())
        assert held <= seen and len(held) > 0.9 * len(seen)
    echo = json.loads((tmp_path / "config.json").read_text())
    assert {t["num_rows"] for t in echo["model"]["tables"]} == {600}


@pytest.mark.parametrize("row_dtype", [None, "int8"])
def test_deltas_lead_to_the_weights_of_the_run(raw: Prepared, tmp_path: Path,
                                               row_dtype: str | None) -> None:
    """Keys arrive, are replaced, and expire.

    Deltas published one by one give the same weights, bit for bit, as a publication of all final
    weights; there is no second copy of the tables.
    """
    run = tmp_path / "run"
    flags = {"dynamic.rows": 90, "dynamic.admit_after": 2, "dynamic.time_to_live": 3}
    train_on(raw, run, checkpoint_every=5, delta_every=1, max_steps=9, **flags)
    whole = load_model(run, "whole", row_dtype)
    (run / "state.pt").rename(tmp_path / "state.pt")
    model = load_model(run, "deltas", row_dtype)
    follower = Follower(lambda: find_weights(run))
    served, before = bits_of(model.publication_name), model.memory_bytes()
    steps, lost, new = [], 0, 0
    for change in follower.changes():
        lost += sum(int((~k.is_held).sum()) for k in change.keys.values())
        new += sum(int(k.is_held.sum()) for k in change.keys.values())
        assert model.publish(change) == 1 + 2 * (change.step - 5)
        follower.applied(change)
        steps.append(change.step)
        assert bits_of(model.publication_name) != served
        served = bits_of(model.publication_name)
    assert steps == [6, 7, 8, 9] and lost > 100 and new > 1000
    assert served == bits_of(whole.publication_name) and model.memory_bytes() == before
    model.close()
    whole.close()


def test_a_run_is_served_with_the_default_row_for_unknown_keys(raw: Prepared, tmp_path: Path
                                                               ) -> None:
    """Served from the run's state or only its checkpoint, over HTTP and in the same process."""
    run = tmp_path / "run"
    flags = {"dynamic.admit_after": 2, "dynamic.time_to_live": 9, "max_steps": 12}
    train_on(raw, run, checkpoint_every=12, **flags)
    trained = config(raw, run, **flags)
    batch = next(iter(click_batches(trained, "valid")))
    keys = batch.sparse_features
    ids = keys.values().clone()
    ids[::5] = torch.arange(ids[::5].numel()) - (1 << 63)  # keys of no row
    lengths = keys.lengths().view(len(keys.keys()), -1)
    request = Request(batch.dense_features.numpy(), lengths.numpy().astype(np.int32), ids.numpy())

    state = load_state(run / "state.pt")
    rows = []
    for name, begin in zip(keys.keys(), keys.offset_per_key(), strict=False):
        records = state[f"{PREFIX}{name}.keys"].tolist()
        clock = int(state[f"{PREFIX}{name}.clock"])
        row_of = {key: slot + 1 for slot, (key, _, seen) in enumerate(records)
                  if seen >= 0 and clock - seen <= 9}
        rows += [row_of.get(k, 0) for k in ids[begin:begin + request.num_samples].tolist()]
    found, names, ends = np.array(rows), keys.keys(), keys.offset_per_key()
    assert 0.2 < (found == 0).mean() < 0.8
    tables = [TableSpec(n, 600, trained.model.dim, (n,)) for n in keys.keys()]  # noqa: SIM118
    model = build_dlrm(tables, request.dense.shape[1], trained.model, seed=9).eval()
    model.load_state_dict({n: state[n] for n in model.state_dict()}, strict=True)
    with torch.no_grad():
        logits: Any = model.model(batch.dense_features, KeyedJaggedTensor(
            keys.keys(), torch.from_numpy(found), lengths=keys.lengths()))
    expected = torch.sigmoid(logits.reshape(-1)).numpy()
    assert expected.std() > 1e-3

    served = load_model(run)
    predictor = served.opener()()
    assert np.abs(predictor.predict(request)[0] - expected).max() < 1e-6
    (run / "state.pt").rename(tmp_path / "state.pt")
    assert find_weights(run).name == CHECKPOINT and served.publish() == 2
    scores, epoch = predictor.predict(request)
    assert epoch == 2 and np.abs(scores - expected).max() < 1e-6
    # A resumed run may have another time to live, here edited in its configuration.
    text = (run / "config.json").read_text()
    assert text.count('"time_to_live": 9') == 1
    (run / "config.json").write_text(text.replace('"time_to_live": 9', '"time_to_live": 1'))
    served.publish()
    assert np.abs(predictor.predict(request)[0] - expected).max() > 1e-6
    (run / "config.json").write_text(text)
    served.publish()
    assert np.abs(predictor.predict(request)[0] - expected).max() < 1e-6
    predictor.close()
    served.close()
    with serving(run, "--json", "--workers", "1") as server:
        client = Client(announced(server)["address"], timeout_s=30)
        assert np.abs(client.score_request(request)[0] - expected).max() < 1e-6
        wait_for(lambda: value_of(client.metrics(), r'oper_keys_read_total{feature="C1"}') > 0)
        text = client.metrics()
    for name, begin, end in zip(names, ends[:-1], ends[1:], strict=True):
        unknown = (found[begin:end] == 0).sum()
        for metric, number in (("keys", end - begin), ("unknown_keys", unknown)):
            assert value_of(text, rf'oper_{metric}_read_total{{feature="{name}"}}') == number


def test_two_processes_have_the_same_keys(raw: Prepared, tmp_path: Path) -> None:
    """Each process is in a memory domain of its own, as on two hosts."""
    (out, _), _ = run_ranks([*words(raw, tmp_path / "two", batch_size=128, epochs=1), "--json"],
                            labels="ab")
    two = json.loads(out)
    one = train_on(raw, tmp_path / "one", epochs=1)
    assert two["auc"] == pytest.approx(one["auc"], abs=1e-3)
    # Counts of keys are the same for any number of ranks.
    counted = [[(x["event"], x.get("keys"), x.get("default_share")) for x in test_train.lines(
        tmp_path / name)] for name in ("one", "two")]
    assert counted[0] == counted[1]
    for name in ("C2", "C26"):
        mine, other = known(tmp_path / "one", name), known(tmp_path / "two", name)
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.counts, other.counts)
        assert torch.allclose(mine.rows, other.rows, atol=1e-3)


def test_a_run_continues_bitwise_and_starts_the_next_day(raw: Prepared, tmp_path: Path) -> None:
    """The run stops after a checkpoint and two deltas, resumes from them, and then starts a new run
    from the complete one."""
    flags = {"checkpoint_every": 6, "delta_every": 2, "dynamic.admit_after": 2}
    whole = train_on(raw, tmp_path / "whole", **flags)
    train_on(raw, tmp_path / "part", max_steps=10, **flags)
    again = train_on(raw, tmp_path / "part", resume=True, **flags)
    assert again["auc"] == whole["auc"]
    mine, other = (load_state(tmp_path / name / "state.pt") for name in ("whole", "part"))
    assert all(torch.equal(value, other[name]) for name, value in mine.items())
    train_on(raw, tmp_path / "next", start=str(tmp_path / "whole"), max_steps=1, **flags)
    before, after = known(tmp_path / "whole", "C26"), known(tmp_path / "next", "C26")
    steps = whole["steps"] - whole["steps"] % 2  # the last delta or checkpoint
    assert after.clock == steps + 1 and set(before.keys.tolist()) & set(after.keys.tolist())


@pytest.fixture(scope="module")
def measured(raw: Prepared, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A finished run with a line of metrics and a validation after every four steps."""
    flags = {"dynamic.tables.C26": 101, "dynamic.admit_after": 2, "dynamic.time_to_live": 3}
    run = config(raw, tmp_path_factory.mktemp("measured"), max_steps=12, log_every=4, eval_every=4,
                 **flags)
    train(run, show_progress=False)
    return run


def test_metrics_count_keys(measured: TrainConfig) -> None:
    """A line has each table's events since the previous line, without those of validations."""
    run, folder = measured, Path(measured.out)
    found = test_train.lines(folder)
    steps = [x["keys"] for x in found if x["event"] == "train"]
    assert len(steps) == 3 and all(x.keys() == {f"C{k}" for k in range(1, 27)} for x in steps)
    for name, rows in (("C26", 100), ("C13", 599)):
        of = [x[name] for x in steps]
        assert [x["lookups"] for x in of] == [4 * run.batch_size] * 3
        keys = known(folder, name).keys.numel()
        assert of[-1]["occupancy"] == keys / rows
        assert sum(x["admitted"] - x["evicted"] - x["expired"] for x in of) == keys
    of = [x["C26"] for x in steps]
    assert of[0]["default_share"] == 1 or of[0]["default_share"] > of[-1]["default_share"] > 0
    assert sum(x["expired"] for x in of)
    records = load_state(folder / "state.pt")[f"{PREFIX}C26.keys"]
    full = (records[:, 2] >= 0).view(2, 50).all(dim=1)  # two buckets of 50 rows
    assert of[-1]["full_buckets"] == float(full.double().mean())
    # The validation's default rows, counted by hand at the end.
    live = oper.KeyedRows.of_entries(load_state(folder / "state.pt"), f"{PREFIX}C26.", 3)
    ids = torch.cat([b.sparse_features["C26"].values() for b in click_batches(run, "valid")])
    share = 1 - float(torch.isin(ids, live.keys).double().mean())
    assert found[-1]["default_share"]["C26"] == pytest.approx(share, abs=1e-12)
    checks = [x for x in found if x["event"] == "valid"]
    assert len(checks) == 2 and all(0 < x["default_share"]["C26"] < 1 for x in checks)


def test_tables_are_given_bytes(raw: Prepared, tmp_path: Path) -> None:
    """Rows, states and directory together take at most these bytes, and one row more does not
    fit."""
    flags: dict[str, Any] = {"dynamic.rows": 0, "dynamic.bytes": 40_000, "max_steps": 1,
                             "dynamic.tables.C2": 50, "checkpoint_every": 1}
    run = config(raw, tmp_path / "run", **flags)
    train(run, show_progress=False)
    state = load_state(tmp_path / "run" / "state.pt")
    rows = state[f"{PREFIX}C1.weight"].shape[0]
    dim, rule = run.model.dim, run.dynamic.rule(1)
    assert state[f"{PREFIX}C2.weight"].shape[0] == 50
    sizes = [n * 4 * (dim + 1) + directory_bytes(n, rule) for n in (rows, rows + 1)]
    assert sizes[0] <= 40_000 < sizes[1] and rows > 600
    assert oper.dynamic_rows(40_000, dim, rule, oper.RowWiseAdagrad()) == rows
    assert oper.dynamic_rows(40_000, dim, rule, oper.Adam()) < rows
    with pytest.raises(InvalidInputError, match=r"cannot continue.*dynamic\.bytes': 50000"):
        train_on(raw, tmp_path / "run", resume=True,
                 **flags | {"dynamic.bytes": 50_000, "max_steps": 2})
    with pytest.raises(InvalidInputError, match=r"bytes=9, expected an integer >= \d+"):
        train_on(raw, tmp_path / "b", **flags | {"dynamic.bytes": 9})


def test_plans_from_statistics_of_keys(
        raw: Prepared, tmp_path: Path, printed: Callable[..., str],
        capsys: pytest.CaptureFixture[str]) -> None:
    """The command line plans, verifies and explains tables as `oper.shard` does, and a run trains
    them."""
    plan, machine = str(tmp_path / "plan.json"), ["--topology", "this-host", "--world-size", "1"]
    columns = Folder.open(raw.folder, allow_raw=True).sparse
    rows = ";".join(f"{name}={101 if name == 'C26' else 600}" for name in columns)
    printed("plan", raw.stats, "-o", plan, *machine, "--dim", "8", "--dynamic-rows", rows,
            "--admit-after", "2", "--eviction", "lfu", "--half-life", "9",
            "--time-to-live", "30", "--time-budget", "1")
    made = oper.Plan.load(plan)
    assert {t.table.num_rows for t in made.tables} == {600, 101}
    stats = oper.AccessStats.load(raw.stats)

    def of_rows(name: str, keys: oper.TableStats) -> oper.TableStats:
        times = (x * 2048 * keys.num_accesses / stats.num_samples for x in (9, 30))
        return rows_of_keys(keys, DynamicRows(101 if name == "C26" else 600, 2, "lfu", *times))

    problem = make_problem([t.table for t in made.tables], replace(stats, tables={
        n: of_rows(n, t) for n, t in stats.tables.items()}),
        topology_preset("this-host", 1), batch_size=2048)
    assert made.step_us == pytest.approx(evaluate(made, problem).step_us, rel=1e-9)
    for verb in ("verify", "explain"):
        printed(verb, plan, "--stats", raw.stats)
    train_on(raw, tmp_path / "run", plan=plan, stats="", max_steps=1, **{"dynamic.tables.C26": 101})
    capsys.readouterr()
    for words, message in ((["--dynamic-rows", "C1=600;nobody=9"], "--dynamic-rows="),
                           (["--dynamic-rows", "many"], "--dynamic-rows="),
                           (["--dynamic-rows", "C1=600;C1=700"], "each table at most once"),
                           (["--dynamic-rows", "1"], "num_rows=1"),
                           (["--eviction", "lfu"], "--eviction='lfu'"),
                           (["--time-to-live", "3"], "--time-to-live=3"),
                           (["--dynamic-rows", "9", "--objective", "inference"], "--objective=")):
        assert main(["plan", raw.stats, "-o", plan, *machine, *words]) != 0
        assert message in capsys.readouterr().err
    for notes in ({"C1": 3}, {"C1": [600, 1, "lru"]}):  # the latter is of an earlier version
        made.notes["dynamic"] = notes
        made.save(plan)
        assert main(["verify", plan, "--stats", raw.stats]) != 0
        message = capsys.readouterr().err
        assert "notes.dynamic" in message and "plan again" in message


def test_page(measured: TrainConfig, tmp_path: Path) -> None:
    assert main(["report", "run", measured.out, "--html", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text()
    check_page(page)
    last = test_train.lines(Path(measured.out))[-1]["default_share"]["C26"]
    for words in ("Default rows", "Occupancy", "Dynamic tables", "Phases", f"{last:.2%}"):
        assert words in page
    assert page.count("<svg") == 4


BAD = [({"dynamic.rows": 1}, "dynamic.rows"), ({"dynamic.rows": 0, "dynamic.half_life": 3},
                                               "dynamic.rows"),
       ({"dynamic.rows": 1 << 32}, "dynamic.rows"), ({"dynamic.bytes": 9}, "dynamic.bytes"),
       ({"dynamic.rows": 0, "dynamic.bytes": -1}, "dynamic.bytes"),
       ({"dynamic.tables.C1": 1}, "dynamic.tables.C1"), ({"sharding": "none", "stats": ""},
                                                         "sharding"),
       ({"dynamic.tables": 3}, "dynamic.tables"), ({"dynamic.eviction": "fifo"}, "eviction")]


@pytest.mark.parametrize(("flags", "name"), BAD)
def test_refused_configurations(raw: Prepared, tmp_path: Path, flags: dict[str, Any], name: str
                                ) -> None:
    with pytest.raises((InvalidInputError, UsageError), match=name):
        config(raw, tmp_path, **flags)


def test_refused_data(raw: Prepared, prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="ids='raw', expected row numbers"):
        train_on(raw, tmp_path / "a", **{"dynamic.rows": 0})
    with pytest.raises(InvalidInputError, match=r"dynamic\.tables=\['nobody'\]"):
        train_on(raw, tmp_path / "a", **{"dynamic.tables.nobody": 9})
    with pytest.raises(InvalidInputError, match=r'bytes=.*set tables_on = "meta"'):
        train_on(raw, tmp_path / "a", **{"dynamic.rows": (1 << 32) - 1, "model.dim": 4096})
    with pytest.raises(InvalidInputError, match="expected a folder of raw ids"):
        train_on(raw, tmp_path / "a", data=prepared.folder, stats="")


def test_data_of_another_numbering_is_refused(raw: Prepared, tmp_path: Path) -> None:
    """For example, a column has strings on one day and numbers on another."""
    flags: dict[str, Any] = {"checkpoint_every": 1, "max_steps": 1, "stats": ""}
    train_on(raw, tmp_path / "run", **flags)
    shutil.copytree(raw.folder, tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    manifest = json.loads(path.read_text()) | {"numbering": "raw ids; hashes of texts: C1"}
    path.write_text(json.dumps(manifest))
    flags |= {"data": str(path.parent), "max_steps": 2}
    with pytest.raises(InvalidInputError, match=r"numbering of the rows.*start over with --force"):
        train_on(raw, tmp_path / "run", resume=True, **flags)
    with pytest.raises(InvalidInputError, match=r"numbering of the rows.*preprocess both the same"):
        train_on(raw, tmp_path / "next", **flags, start=str(tmp_path / "run"))


def test_tables_that_cannot_resume_are_named(raw: Prepared, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"checkpoint_every": 1, "max_steps": 1}
    train_on(raw, tmp_path / "run", **flags)
    words = (r"dynamic tables={'dynamic.rows': \d+.*, expected {'dynamic.rows': 600, .*"
             "set the same values")
    for change in ({"dynamic.rows": 700}, {"dynamic.tables.C1": 9}, {"dynamic.admit_after": 2},
                   {"seed": 9}):
        with pytest.raises(InvalidInputError, match=f"cannot continue from.*{words}"):
            train_on(raw, tmp_path / "run", resume=True, **flags | change | {"max_steps": 2})
        with pytest.raises(InvalidInputError, match=f"cannot start from.*{words}"):
            train_on(raw, tmp_path / "next", **flags | change, start=str(tmp_path / "run"))
