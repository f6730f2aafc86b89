"""``oper bench recommenders``: train and rank with the models of `oper.rl_rec` on real logs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oper.bench.core.launch import Progress
from oper.bench.core.report import text_of
from oper.bench.core.workload import data_files
from oper.bench.quality import kept, trials
from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.data.recipe import Column
from oper.errors import InvalidInputError, UsageError, require
from oper.rl_rec.data.interactions import DataOptions, Interactions, load_interactions
from oper.rl_rec.data.protocols import (
    HELD_OUT_USERS,
    LEAVE_ONE_OUT,
    PUBLISHED,
    Protocol,
    with_labels,
)
from oper.rl_rec.harness import FitOptions, Runs, as_runs, fit, join_runs
from oper.rl_rec.intervals import difference
from oper.rl_rec.models.autoencoders.cadvae import CaDVAE, CaDVAEConfig, MacridVAEConfig
from oper.rl_rec.models.autoencoders.multvae import MultVAEConfig
from oper.rl_rec.models.autoencoders.recvae import RecVAEConfig
from oper.rl_rec.models.cdt4rec import (
    BACKBONES,
    RETURNS,
    CDT4RecConfig,
    DecisionTransformerConfig,
)
from oper.rl_rec.models.gru4rec import GRU4RecConfig
from oper.rl_rec.models.hstu import HSTUConfig
from oper.rl_rec.models.ials import IALSConfig
from oper.rl_rec.models.item_to_item import EASEConfig, ItemKNNConfig
from oper.rl_rec.models.popularity import PopularityConfig
from oper.rl_rec.models.sasrec import SASRecConfig
from oper.rl_rec.models.sqn import DQNConfig, SA2CConfig, SQNConfig
from oper.rl_rec.models.state import STATES
from oper.rl_rec.ranking.evaluate import evaluate_ranking
from oper.support.flags import whole

ODD_BLOCK = 997  # items per block of the ranking that verifies a result, see `_train_and_test`
MOST_SEEDS = 16  # highest seed of stored runs that --seeds 0 reports


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set in the folder named by OPER_DATA.

    Attributes:
        recipe: name of a recipe of ``oper preprocess``.
        files: glob pattern of the log's files in the folder.
        protocols: evaluation protocols (held-out data and metrics) by name.
        columns: additional string columns that the protocols need.
    """

    recipe: str
    files: str
    protocols: Mapping[str, Protocol]
    columns: tuple[str, ...] = ()


# Films are rated one at a time, so the last two ratings can be held out. An invoice's products are
# bought together, and the order of its lines has no meaning, so the entire invoice is held out.
_PRODUCTS = DataOptions(user="CustomerID", item="StockCode", protocol="time")
_INVOICES = dataclasses.replace(_PRODUCTS, protocol="leave_last_baskets", basket="InvoiceNo")
_BY_TIME = Protocol(DataOptions(protocol="time"))
DATA_SETS = {
    "movietweetings": DataSet(
        "movietweetings", "movietweetings*/ratings.dat*",
        {"last-two": Protocol(), "time": _BY_TIME, "leave-one-out": LEAVE_ONE_OUT,
         "held-out-users": HELD_OUT_USERS,
         # Targets as of last-two; ratings 8, 9, 10 have rewards 1/3, 2/3, 1, lower ones <= 0.
         "graded": Protocol(DataOptions(reward_offset=7.0, reward_scale=3.0), graded="none")}),
    "online-retail": DataSet(
        "online-retail", "online_retail/online_retail.csv*",
        {"last-invoice": Protocol(_INVOICES),
         "time": Protocol(_PRODUCTS),
         "held-out-users": dataclasses.replace(HELD_OUT_USERS, data=dataclasses.replace(
             HELD_OUT_USERS.data, user="CustomerID", item="StockCode")),
         # Targets as of last-invoice; q pieces have reward log(1 + q) / log(101), a return 0.
         "graded": Protocol(dataclasses.replace(_INVOICES, reward_scale=math.log(101)),
                            graded="log1p")},
        columns=("InvoiceNo",)),
    # To be supplied by the user, in folders named like the archives.
    "ml-1m": DataSet("movielens", "ml-1m/ratings.dat*",
                     {name: PUBLISHED[name] for name in ("ml-1m", "ml-1m-all-items")}
                     | {"time": _BY_TIME}),
    "ml-20m": DataSet("movielens", "ml-20m/ratings.csv*", {"ml-20m": PUBLISHED["ml-20m"]}),
}
FIGURES = (("fit.chosen_by", *(f"metrics.{metric}" for metric in dict.fromkeys(
    m for source in DATA_SETS.values() for p in source.protocols.values() for m in p.reported))),)
NOTE = ("full ranking; percentile bootstrap over users and seeds; differences are paired by user, "
        "and by seed where both models have as many\n")
_FIT = FitOptions(epochs=60, lr=2e-3, eval_every=3, patience=3)
_LONG = {"eval_every": 5, "patience": 10}  # if the protocol sets the number of epochs
_FIT_SEQUENCES = FitOptions(epochs=14, batch_size=64, lr=3e-3, eval_every=2, patience=2)


@dataclass(frozen=True, slots=True)
class Model:
    """A recommender in the comparison.

    Attributes:
        workload: name of the model in `oper.rl_rec.registry`.
        config: the model's configuration.
        fit: training options.
        ablation: whether the model belongs to ``--models ablations``.
    """

    workload: str
    config: Any
    fit: FitOptions = _FIT
    ablation: bool = False


_SASREC = SASRecConfig(steps=20, layers=1, dropout=0.2)
# A layer of HSTU has 5 D^2 weights, a transformer's 12 D^2.
_HSTU = HSTUConfig(steps=20, layers=2, dropout=0.2)
_CDT4REC = CDT4RecConfig(steps=20, layers=1, dropout=0.2, reward_weight=0.3)
_LOSSES: dict[str, dict[str, Any]] = {
    "": {}, "-full": {"negatives": 0}, "-gbce": {"negatives": 256, "loss": "gbce"}}
# Sizes and learning rates that validation preferred on MovieTweetings, for every data set alike;
# weights of iALS that it preferred on both logs, out of sixteen. Those of itemknn, ease, recvae,
# gru4rec, hstu, and of Q-learning in sqn, sa2c and dqn were not searched for.
MODELS: dict[str, Model] = {
    "popularity": Model("popularity", PopularityConfig()),
    "itemknn": Model("itemknn", ItemKNNConfig()),
    "ease": Model("ease", EASEConfig()),
    "ials": Model("ials", IALSConfig(alpha=0.3, l2=0.01)),
    "multvae": Model("multvae", MultVAEConfig(hidden=200, dim=100, decoder_hidden=200)),
    "recvae": Model("recvae", RecVAEConfig(hidden=200, dim=100)),
    "macridvae": Model("macridvae", MacridVAEConfig(num_concepts=4, hidden=120, dim=40)),
    "cadvae": Model("cadvae", CaDVAEConfig(hidden=120, dim=40, sharpness=1.0)),
    "gru4rec": Model("gru4rec", GRU4RecConfig(steps=20, dropout=0.2), _FIT_SEQUENCES),
    **{f"{name}{suffix}": Model(name, dataclasses.replace(config, **loss), _FIT_SEQUENCES)
       for name, config in (("sasrec", _SASREC), ("hstu", _HSTU))
       for suffix, loss in _LOSSES.items()},
    **{name: Model(name, config(steps=20, layers=1, dropout=0.2), _FIT_SEQUENCES)
       for name, config in (("sqn", SQNConfig), ("sa2c", SA2CConfig), ("dqn", DQNConfig))},
    "dt": Model("dt", DecisionTransformerConfig(steps=20, layers=1, dropout=0.2), _FIT_SEQUENCES),
    "cdt4rec": Model("cdt4rec", _CDT4REC, _FIT_SEQUENCES),
}


def _ablations() -> Iterator[tuple[str, Model]]:
    """Yield name and model of CDT4Rec's ablations: all combinations of backbone, returns, reward
    head and loss, and the default model with each kind of state (`STATES`)."""
    def model(**changes: Any) -> Model:
        return Model("cdt4rec", dataclasses.replace(_CDT4REC, **changes), _FIT_SEQUENCES, True)

    for backbone, returns, head, (suffix, loss) in itertools.product(
            BACKBONES, RETURNS, (True, False), _LOSSES.items()):
        if returns != "estimated" or (head and backbone == "causal"):
            yield (f"cdt4rec-{backbone}-{returns}-{'head' if head else 'no-head'}{suffix}",
                   model(backbone=backbone, returns=returns,
                         reward_weight=_CDT4REC.reward_weight if head else 0.0, **loss))
    for state in STATES:
        yield f"cdt4rec-state-{state}", model(state=state)


MODELS.update(_ablations())


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one data set under one protocol.

    Attributes:
        name: ``data/protocol/model``.
        data: key of `DATA_SETS`.
        protocol: key of its protocols.
        model: key of `MODELS`.
        spec: its configuration and training options, `MODELS[model]` before a search.
        quick: whether to train with one seed and few epochs.
        seeds: number of seeds, 1 to `seeds`; 0 = train nothing and report stored runs.
        runs: folder of stored runs; None = store nothing.
        num_trials: number of trials of the search for settings; 0 = no search.
        earlier: runs of preceding cases by (data set, protocol) and model; shared by all cases.
    """

    name: str
    data: str
    protocol: str
    model: str
    spec: Model
    quick: bool
    seeds: int
    runs: str | None
    num_trials: int
    earlier: dict[tuple[str, str], dict[str, Runs]]

    @property
    def under(self) -> Protocol:
        """The `Protocol` that `protocol` names."""
        return DATA_SETS[self.data].protocols[self.protocol]

    @property
    def config(self) -> Any:
        """The model's configuration, for a sequence model with the protocol's context length; with
        graded rewards, the reward head's loss is the squared error."""
        config, context = self.spec.config, self.under.context
        if self.under.graded and hasattr(config, "reward_loss"):
            config = dataclasses.replace(config, reward_loss="mse")
        if not context or not hasattr(config, "steps"):
            return config
        return dataclasses.replace(config, steps=context + 1 - config.window)

    @property
    def fit(self) -> FitOptions:
        """Training options, with validation by the protocol's metrics."""
        few = {"epochs": self.under.epochs, **_LONG} if self.under.epochs else {}
        if self.quick:
            few = {"epochs": 4, "eval_every": 2}
        return dataclasses.replace(self.spec.fit, metrics=self.under.metrics,
                                   chosen_by=self.under.reported[0], **few)

    def measure(self, progress: Progress) -> dict[str, Any]:
        """Search for settings if there are trials, train and test the model; returns the record's
        entry, with differences from the preceding models on the same data set and protocol."""
        data = load(self.data, self.protocol)
        case, found = self.searched(data, progress) if self.num_trials else (self, None)
        runs = join_runs([case._run(data, seed, progress) for seed in seeds_of(case)])
        earlier = self.earlier.setdefault((self.data, self.protocol), {})
        against = {other: {m: difference(runs.per_user[m], before.per_user[m]).to_json()
                           for m in self.under.reported} for other, before in earlier.items()}
        earlier[self.model] = runs
        return {"model": self.model, "config": dataclasses.asdict(case.config),
                "fit": dataclasses.asdict(case.fit), "protocol": dataclasses.asdict(self.under),
                "data": _about(data), "runs": list(runs.fitted), "threads": torch.get_num_threads(),
                "metrics": {m: i.to_json() for m, i in runs.intervals().items()},
                "verified": all(f["verified"] for f in runs.fitted), "against": against,
                **({"search": found} if found else {})}

    def trial(self, k: int) -> Case:
        """The case with the settings of trial k of the search."""
        config, options = trials.with_settings(self.spec.config, self.spec.fit,
                                               trials.settings(self.model, k))
        return dataclasses.replace(self, num_trials=0, spec=dataclasses.replace(
            self.spec, config=config, fit=options))

    def searched(self, data: Interactions, progress: Progress) -> tuple[Case, dict[str, Any]]:
        """The case with the settings that are best for the validation users, and the record of the
        search; test users have no part in the choice. A trial that cannot be trained is recorded as
        failed. If none can be trained, raises the InvalidInputError of the last one."""
        valid, problem = f"valid_{self.fit.chosen_by}", None
        tried: list[dict[str, Any]] = []
        for k in range(self.num_trials):
            tried.append({"settings": trials.settings(self.model, k)})
            try:
                result = self.trial(k)._run(data, trials.SEED, progress).fitted[0]
                tried[k] |= {key: result[key] for key in (valid, "epochs", "seconds")}
            except InvalidInputError as error:
                tried[k]["failed"], problem = str(error), error
        able = [k for k in range(self.num_trials) if "failed" not in tried[k]]
        if problem is not None and not able:
            raise problem
        best = max(able, key=lambda k: float(tried[k][valid]))
        return self.trial(best), {
            "trials": tried, "chosen": best, "seed": trials.SEED,
            "space": {name: dataclasses.asdict(values)
                      for name, values in trials.SPACES[self.model].items()}}

    def _run(self, data: Interactions, seed: int, progress: Progress) -> Runs:
        """Load a stored run, or train and test the model. The InvalidInputError of a trial is
        stored, too, and raised again."""
        place = _place(self, data, seed)

        def trained() -> dict[str, np.ndarray]:
            try:
                found = _train_and_test(self, data, seed,
                                        place and place.with_suffix(".unfinished"))
            except InvalidInputError as error:
                if seed != trials.SEED:
                    raise
                return {"about": np.array(json.dumps({"failed": str(error)}))}
            return {"about": np.array(json.dumps(found.fitted[0])), **found.per_user}

        arrays = kept.once(place, trained)
        result, by = json.loads(str(arrays.pop("about"))), self.fit.chosen_by
        if "failed" in result:
            raise InvalidInputError(result["failed"])
        progress(f"seed {seed}: validation {by} {result[f'valid_{by}']:.4f} after "
                 f"{result['epochs']} epochs, {result['seconds']:.0f} s of processor time")
        return Runs(self.model, (seed,), arrays, (result,))


def cases(quick: bool, models: str = "", seeds: int = 3, runs: str | None = None,
          search: int | None = None) -> list[Case]:
    """A case per model (or ablation), available data set and protocol; with `search` only models
    with ranges of settings, with `seeds` = 0 only those with stored runs. Raises InvalidInputError
    if there are none."""
    if search and models:
        raise UsageError("no ranges of settings to search", "--models", models,
                         "no value with --search", "leave out one of the two")
    earlier: dict[tuple[str, str], dict[str, Runs]] = {}
    found = [Case(f"{data}/{protocol}/{name}", data, protocol, name, model, quick, seeds, runs,
                  search or 0, earlier)
             for data, source in DATA_SETS.items() if data_files(source.files)
             for protocol in source.protocols for name, model in MODELS.items()
             if (name in trials.SPACES if search else
                 model.ablation == bool(models) or (models and name == "sasrec"))]
    if not found:
        raise InvalidInputError("no logs to run on", "OPER_DATA", os.environ.get("OPER_DATA"),
                                f"a folder with one of {[d.files for d in DATA_SETS.values()]}",
                                "set it to the folder with the logs")
    if not seeds and not (found := [case for case in found if seeds_of(case)]):
        raise InvalidInputError("no saved runs to report", "--runs", runs,
                                "a folder with runs of the current source files and logs",
                                "give another folder, or train with --seeds 1 or more")
    return found


def check_resumed(known: Mapping[str, Mapping[str, Any]], chosen: Sequence[Case]) -> None:
    """Raise InvalidInputError if a resumed record has searched with another number of trials."""
    for name, entry in known.items():
        number = len(entry.get("search", {}).get("trials", ()))
        require("cannot resume from a record", "give the same --search as for the record, or give "
                "--runs instead of --resume", (
                    f"trials of {name}", number, number == chosen[0].num_trials,
                    f"{chosen[0].num_trials} (0 without --search)"))


def seeds_of(case: Case) -> list[int]:
    """The seeds to train with; if `case.seeds` is 0, those of stored runs."""
    if case.seeds:
        return list(range(1, 2 if case.quick else case.seeds + 1))
    if case.runs is None or not any(Path(case.runs).glob(f"{case.name.replace('/', '-')}-*")):
        return []  # the log need not be read
    data = load(case.data, case.protocol)
    if case.num_trials:
        if not all(_stored(case.trial(k), data, trials.SEED) for k in range(case.num_trials)):
            return []
        try:
            case, _ = case.searched(data, lambda text: None)
        except InvalidInputError:  # no trial could be trained
            return []
    return [seed for seed in range(1, MOST_SEEDS + 1)
            if _stored(case, data, seed)]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=whole(0), default=3, metavar="N",
                        help="train every model from seeds 1..N (default 3); 0: train nothing, "
                             "report the runs saved in --runs")
    parser.add_argument("--models", choices=("ablations",), default="",
                        help="ablations: train only CDT4Rec, with every combination of returns, "
                             "reward head, backbone and loss, and every state")
    parser.add_argument("--search", type=whole(1), metavar="N",
                        help="first search for the settings of every model that has ranges of "
                             "settings, and leave out the others: N trials, one with the model's "
                             "own settings and N - 1 with settings drawn at random; then train "
                             "with the settings that are best on validation, from all seeds")
    parser.add_argument("--runs", metavar="DIR",
                        help="save every training run in this folder, and its state after every "
                             "validation; continue and reuse saved runs of the same data and "
                             "source files")
    parser.epilog = ("Logs are read from the folder in OPER_DATA. To continue an interrupted run, "
                     "repeat it with the same --runs: with --resume, the record lacks differences "
                     "between models that were run before and after the interruption.")


@functools.cache
def load(name: str, protocol: str) -> Interactions:
    """The interactions of a data set, preprocessed from the raw log for an evaluation protocol."""
    source = DATA_SETS[name]
    held = source.protocols[protocol]
    recipe, more = with_labels(load_recipe(source.recipe), held), tuple(
        Column(name, "sparse", "string") for name in source.columns)
    recipe = dataclasses.replace(recipe, layouts=tuple(
        dataclasses.replace(layout, columns=(*layout.columns, *more))
        for layout in recipe.layouts))
    with tempfile.TemporaryDirectory() as folder:
        preprocess(recipe, data_files(source.files), Path(folder) / "data",
                   PreprocessOptions(min_count=1, valid="0", test="0"))
        return load_interactions(Path(folder) / "data", held.data)


def _place(case: Case, data: Interactions, seed: int) -> Path | None:
    """The file of the stored run; None without a folder."""
    key = json.dumps([dataclasses.asdict(case.config), dataclasses.asdict(case.fit), seed,
                      data.digest()], sort_keys=True)
    return kept.place(case.runs, case.name.replace("/", "-"), key.encode())


def _stored(case: Case, data: Interactions, seed: int) -> bool:
    place = _place(case, data, seed)
    return place is not None and place.exists()


def _train_and_test(case: Case, data: Interactions, seed: int, unfinished: Path | None) -> Runs:
    done = fit(case.spec.workload, case.config, data, seed, case.fit, resume=unfinished)
    # Verify by ranking with other block and batch sizes, which may change the last bits of scores.
    again = evaluate_ranking(done.model, data, "test", metrics=case.under.metrics, block=ODD_BLOCK,
                             batch_size=100).summary()
    first = done.test.summary()
    runs = as_runs(case.model, seed, done)
    runs.fitted[0]["verified"] = all(abs(again[m] - first[m]) < 1e-3 for m in case.under.reported)
    if isinstance(done.model, CaDVAE) and case.config.graph != "none":
        runs.fitted[0]["graph"] = [[round(float(x), 3) for x in row]
                                   for row in done.model.adjacency.detach()]
    return runs


def _about(data: Interactions) -> dict[str, Any]:
    lengths, held = (data.train_stop - data.offsets[:-1])[1:], data.held_out("test")
    return {"source": data.source, "users": data.num_users - 1, "items": data.num_items - 1,
            "interactions": int(data.users.size), "left_out": data.left_out,
            "training_interactions": int(lengths.sum()),
            "training_interactions_per_user": np.mean(lengths),
            "test_users": held.users.size,
            "targets_per_test_user": held.targets.size / max(1, held.users.size)}


def totals(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The processor hours of all trials of a search that did not fail, if there was one."""
    seconds = [t["seconds"] for e in entries if "search" in e for t in e["search"]["trials"]
               if "failed" not in t]
    return {"search_processor_hours": round(sum(seconds) / 3600, 3)} if seconds else {}


def remarks(entries: Sequence[Mapping[str, Any]]) -> str:
    """Text: chosen settings, and the differences between models in the first reported metric."""
    chosen = ((e["name"], e["search"]["chosen"], e["search"]["trials"]) for e in entries
              if "search" in e)
    return "".join(f"{name}: trial {k} of {len(tried)} chosen, "
                   f"{text_of(tried[k]['settings']) or 'its own settings'}\n"
                   for name, k, tried in chosen) + "".join(
        f"{e['name']} minus {other}: {by} {text_of(found[by])}\n" for e in entries
        for by in e["protocol"]["reported"][:1] for other, found in e["against"].items())
