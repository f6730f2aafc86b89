"""The configuration of a training run, as frozen dataclasses.

Command-line flags override the TOML file, which overrides the defaults.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from oper.errors import InvalidInputError, UsageError, fail
from oper.ranges import Amount, Count, Positive, Rule, one_of, rules_of
from oper.rl_rec.data.catalogue import Catalogue
from oper.rl_rec.data.interactions import DataOptions
from oper.rows.directory import MAX_ROWS
from oper.shmem.keys.rules import DynamicTable
from oper.support.files import read_toml
from oper.support.settings import Reader

if TYPE_CHECKING:
    from oper.shmem.optim.optimizers import Optimizer

# By name in a configuration: the class in `oper`, and its options.
TABLE_OPTIMIZERS = {
    "rowwise_adagrad": ("RowWiseAdagrad", ("eps", "weight_decay", "initial_accumulator_value")),
    "sgd": ("SGD", ("momentum", "weight_decay")),
    "adagrad": ("Adagrad", ("eps", "initial_accumulator_value")),
    "adam": ("Adam", ("eps", "weight_decay")),
    "partial_rowwise_adam": ("PartialRowWiseAdam", ("eps", "weight_decay")),
    "lars_sgd": ("LarsSGD", ("momentum", "weight_decay")),
    "lamb": ("LAMB", ("eps", "weight_decay")),
    "partial_rowwise_lamb": ("PartialRowWiseLAMB", ("eps", "weight_decay")),
}
_TABLE_OPTIONS = ("momentum", "weight_decay", "initial_accumulator_value")
_STEPS = re.compile(r"[1-9]\d*-[1-9]\d*")
_TRACED = "11-20"  # default of trace_steps; not the first steps, which allocate memory
Sizes = Annotated[tuple[int, ...], Rule(lambda x: min(x, default=1) >= 1, "sizes >= 1")]
PATHS = ("data", "out", "stats", "plan", "topology", "start", "remap", "trace")


@dataclass(frozen=True, slots=True)
class DLRMConfig:
    """A DLRM, or with cross layers a DLRM-DCNv2.

    Attributes:
        dim: columns of every table, and size of the bottom MLP's last layer.
        dense_layers: sizes of the bottom MLP's other layers.
        over_layers: sizes of the top MLP's layers before its single output.
        cross_layers: number of layers of the low-rank cross network between the MLPs; 0 = dot
            products of all pairs of embeddings instead.
        cross_rank: rank of the matrices of a cross layer.
    """

    dim: Positive = 32
    dense_layers: Sizes = (128, 64)
    over_layers: Sizes = (128, 64)
    cross_layers: Count = 0
    cross_rank: Positive = 64

    def __post_init__(self) -> None:
        _check("model.", self)


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Optimizers of the tables and of the dense layers.

    Attributes:
        tables: optimizer of the tables: ``"rowwise_adagrad"``, ``"sgd"``, ``"adagrad"``,
            ``"adam"``, ``"partial_rowwise_adam"``, ``"lars_sgd"``, ``"lamb"`` or
            ``"partial_rowwise_lamb"``. With ``sharding="none"`` or
            ``"torchrec"``, only ``"rowwise_adagrad"`` and ``"sgd"`` are supported, without
            momentum, weight decay and initial accumulator value.
        tables_lr: learning rate of the tables.
        tables_eps: epsilon of the optimizers that have one.
        tables_momentum: momentum of ``"sgd"`` and ``"lars_sgd"``.
        tables_weight_decay: weight decay of all optimizers but ``"adagrad"``.
        tables_initial_accumulator_value: initial value of the accumulators of ``"adagrad"`` and
            ``"rowwise_adagrad"``.
        dense: optimizer of the dense layers, ``"adagrad"``, ``"sgd"`` or ``"adam"``.
        dense_lr: learning rate of the dense layers.
    """

    tables: Annotated[str, one_of(*TABLE_OPTIMIZERS)] = "rowwise_adagrad"
    tables_lr: Amount = 0.02
    tables_eps: Amount = 1e-8
    tables_momentum: Amount = 0.0
    tables_weight_decay: Amount = 0.0
    tables_initial_accumulator_value: Amount = 0.0
    dense: Annotated[str, one_of("adagrad", "sgd", "adam")] = "adagrad"
    dense_lr: Amount = 0.01

    def __post_init__(self) -> None:
        _, options = TABLE_OPTIMIZERS.get(self.tables, ("", ()))
        _check("optimizer.", self,
               *((f"tables_{name}", name in options,
                  f"0 with tables={self.tables!r}, which has no such option")
                 for name in self.table_options))

    @property
    def table_options(self) -> dict[str, float]:
        """Nonzero options of the tables' optimizer other than eps, by name without ``tables_``."""
        return {n: x for n in _TABLE_OPTIONS if (x := getattr(self, f"tables_{n}"))}


@dataclass(frozen=True, slots=True)
class DynamicConfig:
    """Dynamic tables, for data of raw ids; see `oper.DynamicTable`.

    Attributes:
        rows: rows of every table, including the default row; 0 = tables are static.
        bytes: in place of `rows`, bytes of every table with optimizer states and directory of
            keys; it gets as many rows as fit.
        tables: maps columns to their tables' rows, in place of `rows` or `bytes`.
        admit_after: occurrences, over all ranks, after which a key gets a row; 1 = at the first.
        admit_probability: probability that an update gives a row to a key that it sees; must be 1
            if `admit_after` > 1.
        eviction: key that loses its row to a new key: ``"lru"``, the least recently seen;
            ``"lfu"``, the least frequently seen; or ``"distance_lfu"``, that with the lowest
            count / (updates since it was last seen + 1).
        half_life: updates after which counts are halved; 0 = never.
        time_to_live: updates after which an unused key expires; 0 = never.
    """

    rows: int = 0
    bytes: Count = 0
    tables: dict[str, int] = field(default_factory=dict)
    admit_after: int = 1
    admit_probability: float = 1.0
    eviction: str = "lru"
    half_life: int = 0
    time_to_live: int = 0

    def __post_init__(self) -> None:
        for name, rows in (("rows", self.rows), *((f"tables.{n}", r)
                                                  for n, r in self.tables.items())):
            if not 2 <= rows <= MAX_ROWS and (name, rows) != ("rows", 0):
                raise _bad(f"dynamic.{name}", rows, f"in [2, {MAX_ROWS}], since the default row "
                           "and a key need 2")
        _check("dynamic.", self, ("bytes", not (self.rows and self.bytes), "0 with dynamic.rows"))
        rest = (self.tables, self.admit_after, self.admit_probability, self.eviction,
                self.half_life, self.time_to_live)
        if not self.is_on and rest != ({}, 1, 1.0, "lru", 0, 0):
            raise _bad("dynamic.rows", 0,
                       ">= 2, or dynamic.bytes > 0, if other keys of [dynamic] are set")
        self.rule(0)

    @property
    def is_on(self) -> bool:
        """Whether tables are dynamic."""
        return bool(self.rows or self.bytes)

    def rule(self, seed: int) -> DynamicTable:
        """Return the tables' `oper.DynamicTable`; raises InvalidInputError for invalid settings."""
        return DynamicTable(
            admit_after=self.admit_after, admit_probability=self.admit_probability,
            eviction=self.eviction, half_life=self.half_life or None,
            time_to_live=self.time_to_live or None, seed=seed)

    def rows_of(self, columns: Sequence[str], dim: int, optimizer: Optimizer) -> tuple[int, ...]:
        """Return the rows of the tables of `columns`, in order, with `dim` columns.

        Raises:
            InvalidInputError: a key of `tables` is not among the columns, or `bytes` is too small.
        """
        unknown = sorted(set(self.tables) - set(columns))
        if unknown:
            raise _bad("dynamic.tables", unknown, f"some of the data's columns {list(columns)[:8]}")
        rows = self.rows
        if self.bytes:
            from oper.shmem.keys.directories import dynamic_rows

            rows = dynamic_rows(self.bytes, dim, self.rule(0), optimizer)
        return tuple(self.tables.get(name, rows) for name in columns)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run.

    Attributes:
        data: folder written by ``oper preprocess``; empty with a synthetic catalogue.
        out: folder for metrics, configuration and the trained state.
        sharding: ``"oper"``, ``"none"`` (one process, unsharded) or ``"torchrec"``.
        stats: access statistics file for ``"oper"``; empty = plan from table sizes.
        plan: plan file for ``"oper"``; empty = make a plan from `stats`.
        topology: topology file for the planner; empty = this host.
        seed: seed of the initial weights and of the order of the rows.
        batch_size: samples per rank and step.
        shuffle: whether training rows are in random order instead of the order of the log (DLRMs;
            batches of a recommender are always in random order).
        epochs: passes over the training split.
        max_steps: maximum number of steps; 0 = no limit.
        log_every: steps between lines of the metrics file, and between checks for an interrupt.
        eval_every: steps between validations; 0 = only at the end.
        eval_users: number of evenly spaced users for validation of a recommender; 0 = all.
        checkpoint_every: steps between checkpoints in `out`; 0 = none. A run that torchrun
            restarts, or that is started with ``--resume``, continues from the last one. Requires
            ``sharding="oper"``.
        start: folder of an earlier run (its `out`), whose last checkpoint is loaded, including
            optimizer states; for example the previous day's run. Tables may have grown (``oper
            vocabulary extend``). Requires ``sharding="oper"``.
        remap: re-map that ``oper vocabulary extend --reorder`` wrote between the run of `start`
            and this one, by which rows are renumbered (DLRMs).
        delta_every: steps between deltas, the changed rows, which are written while training
            continues; 0 = none. Requires `checkpoint_every`.
        guard: reaction to non-finite gradients with ``sharding="oper"``. ``"off"``: none;
            ``"stop"``: stop the run; ``"skip"``: tables ignore the affected samples, and the dense
            layers the step. The last two report the table or parameter and the step, and take a
            pass over the gradient of the embeddings.
        trace: file for a trace of some steps on all ranks, for ui.perfetto.dev; see `oper.trace`.
            Requires ``sharding="oper"``.
        trace_steps: first and last step of `trace`, ``"A-B"``; empty = ``"11-20"``.
        tables_on: ``"cpu"``: every rank initialises entire tables from the seed, so that runs with
            any `sharding` start from the same weights. ``"meta"``: a rank initialises only its
            shards, for tables that do not fit one process; the weights differ from those of
            ``"cpu"`` but do not depend on the plan.
        model_name: ``"dlrm"`` or a recommender of `oper.rl_rec.registry`; the key ``name`` in the
            section ``[model]`` of a file.
        model: configuration of the model, a `DLRMConfig` or that of the recommender.
        optimizer: optimizers of the tables and of the dense layers.
        dynamic: dynamic tables, for data of raw ids (``oper preprocess --raw-ids``); requires a
            DLRM and ``sharding="oper"``.
        interactions: conversion of the log in `data` to interactions (recommenders).
        catalogue: synthetic interactions, in place of `data` (recommenders).

    Raises:
        InvalidInputError: a value is out of range or contradicts another one.
    """

    data: str = ""
    out: str = "runs/dlrm"
    sharding: Annotated[str, one_of("oper", "none", "torchrec")] = "oper"
    stats: str = ""
    plan: str = ""
    topology: str = ""
    seed: Annotated[int, Rule(lambda x: 0 <= x < 1 << 64, "an integer >= 0 and < 2^64")] = 1
    batch_size: Positive = 2048
    shuffle: bool = True
    epochs: Positive = 1
    max_steps: Count = 0
    log_every: Positive = 20
    eval_every: Count = 0
    eval_users: Count = 0
    checkpoint_every: Count = 0
    delta_every: Count = 0
    guard: Annotated[str, one_of("off", "stop", "skip")] = "off"
    trace: str = ""
    trace_steps: str = ""
    start: str = ""
    remap: str = ""
    tables_on: Annotated[str, one_of("cpu", "meta")] = "cpu"
    model_name: str = "dlrm"
    model: Any = field(default_factory=DLRMConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dynamic: DynamicConfig = field(default_factory=DynamicConfig)
    interactions: DataOptions = field(default_factory=DataOptions)
    catalogue: Catalogue = field(default_factory=Catalogue)

    def __post_init__(self) -> None:
        is_ours, elsewhere = self.sharding == "oper", f"with sharding={self.sharding!r}"
        plain, ours_only = ("rowwise_adagrad", "sgd"), "0 unless sharding='oper'"
        of_dynamic = {"sharding": "oper", "model_name": "dlrm"}
        num_items, is_dlrm = self.catalogue.num_items, self.model_name == "dlrm"
        _check("catalogue.", self.catalogue,
               ("num_items", not is_dlrm or not num_items, "0 with a DLRM"),
               ("num_items", num_items > 0 or self.catalogue == Catalogue(),
                ">= 2 if other keys of [catalogue] are set"))
        _check(
            "", self,
            ("data", bool(self.data) != bool(num_items),
             "a folder written by oper preprocess, or '' if catalogue.num_items is set"),
            ("out", bool(self.out), "a folder to write to"),
            ("seed", self.seed < 2**63, "< 2^63, the limit of torch"),
            ("remap", bool(self.start) or not self.remap, "'' without start"),
            ("remap", is_dlrm or not self.remap,
             "'' with a recommender, whose rows are numbered by training counts"),
            ("shuffle", is_dlrm or self.shuffle, "true with a recommender"),
            ("eval_users", not is_dlrm or not self.eval_users, "0 with a DLRM"),
            ("interactions", self.interactions == DataOptions() or not (is_dlrm or num_items),
             "no keys with a DLRM or a catalogue"),
            *((name, is_ours or not getattr(self, name), f"'' {elsewhere}")
              for name in ("stats", "plan", "topology", "start", "trace")),
            ("start", not self.start or os.path.realpath(self.start) != os.path.realpath(self.out),
             "a folder other than out (to continue a run, pass --resume)"),
            ("checkpoint_every", is_ours or not self.checkpoint_every, ours_only),
            ("delta_every", bool(self.checkpoint_every) or not self.delta_every,
             "0 without checkpoint_every"),
            *((name, not self.dynamic.is_on or getattr(self, name) == value,
               f"{value!r} with dynamic tables") for name, value in of_dynamic.items()),
            ("guard", is_ours or self.guard == "off", f"'off' {elsewhere}"),
            ("tables_on", (self.sharding, self.tables_on) != ("none", "meta"),
             "'cpu' with sharding='none'"),
            ("trace_steps", bool(self.trace) or not self.trace_steps, "'' without trace"),
            ("trace_steps", bool(_STEPS.fullmatch(self.trace_steps or _TRACED)),
             'A-B, two step numbers, such as "11-20"'))
        _check("", self, ("trace_steps", self.traced[0] <= self.traced[1], "A <= B"))
        _check("optimizer.", self.optimizer,
               ("tables", is_ours or self.optimizer.tables in plain, f"one of {plain} {elsewhere}"),
               *((f"tables_{name}", is_ours, ours_only) for name in self.optimizer.table_options))

    @property
    def traced(self) -> tuple[int, int]:
        """First and last step of `trace`."""
        first, _, last = (self.trace_steps or _TRACED).partition("-")
        return int(first), int(last)

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["model"]["name"] = values.pop("model_name")
        return values


class _KeyError(InvalidInputError):
    """An error in the values of `keys`, which may be from a file or from flags."""

    def __init__(self, text: str, keys: set[str]) -> None:
        super().__init__(text)
        self.keys = keys


def load_config(path: str | os.PathLike[str] | None, flags: Mapping[str, Any] | None = None
                ) -> TrainConfig:
    """Read a configuration.

    Args:
        path: TOML file; None = defaults. Paths in the file are relative to its folder.
        flags: maps dotted keys to values from the command line, e.g. ``{"model.dim": 64}``. Paths
            are relative to the current folder. Strings are converted to the key's type.

    Raises:
        FileFormatError: the file is not TOML.
        InvalidInputError: a key is unknown, or a value has the wrong type or is out of range; a
            UsageError if it is from a flag, or missing and there is no file.
        FileNotFoundError: the file does not exist.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = read_toml(path, f"cannot read {os.fspath(path)!r} as a training configuration")
        for name in PATHS:
            if isinstance(values.get(name), str) and values[name]:
                values[name] = str(Path(path).parent / values[name])
    try:
        for key, value in (flags or {}).items():
            *sections, name = key.split(".")
            place = values
            for section in sections:
                place = place.setdefault(section, {})
                if not isinstance(place, dict):
                    raise _bad(key, value, "a key inside a section")
            place[name] = value
        return _READER.build(TrainConfig, _with_model(values))
    except InvalidInputError as error:
        if path is None or (flags and _is_of_flags(error, flags, path)):
            raise UsageError(str(error)) from None
        raise


def _is_of_flags(error: InvalidInputError, flags: Mapping[str, Any], path: str | os.PathLike[str]
                 ) -> bool:
    """Whether an error in the values of a file and of flags, which override it, is of the flags."""
    if isinstance(error, _KeyError):
        # An error may be in a part of a flag's list, or in a section that a flag has made.
        return any(f"{flag}.".startswith(f"{key}.") or key.startswith(f"{flag}[")
                   for key in error.keys for flag in flags)
    try:  # classes of other packages, such as that of a recommender, name no keys
        load_config(path)
    except InvalidInputError as without:
        return str(without) != str(error)
    return True


def _with_model(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with ``[model]`` replaced by an object of the model's configuration class."""
    if "model_name" in values:
        raise _bad("unknown keys", ["model_name"], "model.name, the name of a model")
    section = values.get("model", {})
    if not isinstance(section, Mapping):
        raise _bad("model", section, "a section of keys")
    section = dict(section)
    name = section.pop("name", "dlrm")
    kind: type = DLRMConfig
    if name != "dlrm":
        from oper.rl_rec.registry import WORKLOADS

        if not isinstance(name, str) or name not in WORKLOADS:
            raise _bad("model.name", name, f"one of {['dlrm', *WORKLOADS]}")
        kind = WORKLOADS[name].config
    return {**values, "model_name": name, "model": _READER.build(kind, section, "model.")}


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """Convert ``["model.dim=64"]`` to ``{"model.dim": "64"}``.

    Raises:
        UsageError: a setting is not KEY=VALUE, or a key is set twice.
    """
    pairs: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip() or key.strip() in pairs:
            raise UsageError(str(_bad("--set", setting, "KEY=VALUE, each key once")))
        pairs[key.strip()] = value.strip()
    return pairs


def _check(section: str, of: object, *checks: tuple[str, bool, str]) -> None:
    """Raise InvalidInputError for the first field of `of` that breaks the rule of its type or one
    of `checks`, each (field, whether it is valid, expected)."""
    for name, is_right, expected in (*rules_of(of), *checks):
        if not is_right:
            raise _bad(section + name, getattr(of, name), expected)


def _bad(name: str, value: object, expected: str) -> _KeyError:
    return _KeyError(
        fail("invalid training configuration", name, value, expected,
             "change it in the configuration file, or with --set KEY=VALUE"),
        set(value) if name == "unknown keys" and isinstance(value, list) else {name})


_READER = Reader(_bad, from_text=True)
