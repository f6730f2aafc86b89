"""Recipes, which define the columns of a raw log, how they are parsed, and how it is split."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from oper.errors import InvalidInputError, require
from oper.ranges import Count, Finite, Parsed, Positive, Rule, one_of, within
from oper.support.files import datasets_root, read_toml
from oper.support.settings import Reader

KINDS = {  # by kind of column, the accepted values of `Column.parse`, the default first
    "label": ("binary", "threshold", "among", "number"),
    "dense": ("int", "float"),
    "sparse": ("hex32", "uint32", "uint64", "int", "integral", "string", "bins"),
    "time": ("unix", "unix_ms", "iso", "iso_zone", "yymmddhh"),
    "skip": ("",),
}
TRANSFORMS = ("log1p", "none")
FORMATS = ("text", "jsonl", "bags", "parquet", "npy")
ENCODINGS = ("utf-8", "latin-1")
_SHARE = re.compile(r"[0-9.]{1,40}(e[+-]?[0-9]{1,3})?|[0-9]{1,20}/[0-9]{1,20}")


def parse_share(value: object, what: str, name: str) -> Fraction:
    """Parse a share in [0, 1) such as ``"1/7"`` or ``"0.1"``; raises InvalidInputError.

    `what` and `name` begin the error message, see `oper.errors.require`.
    """
    text = str(value)
    try:
        # Limited exponents: Fraction("1e1000000000") would allocate an enormous integer.
        share = Fraction(text if _SHARE.fullmatch(text) else -1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    require(what, "write a share below 1",
            (name, value, 0 <= share < 1, "a share from 0 to below 1, e.g. '1/7'"))
    return share


def _text(value: object) -> str:
    """Return text, or the text of a number, such as the code ``-1`` of a missing field."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    return str(value)


Text = Annotated[str, Parsed(_text, "text")]
Share = Annotated[Fraction, Parsed(lambda x: parse_share(x, "", ""),
                                   "a share from 0 to below 1, e.g. '1/7'")]
Character = Annotated[str, Rule(lambda x: not x or (len(x) == 1 and 32 < ord(x) < 127),
                                "a printable ASCII character or ''")]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a raw log.

    Attributes:
        name: name of the column in the output.
        kind: ``"label"``, ``"dense"``, ``"sparse"``, ``"time"`` or ``"skip"``.
        parse: how a field is converted. Labels: ``"binary"`` (0 or 1), ``"threshold"`` (1 for
            numbers >= `threshold`), ``"among"`` (1 for strings in `positive`) or ``"number"`` (the
            number itself, such as a rating, an amount or a duration). Dense columns: ``"int"``
            (decimal) or ``"float"``. Ids: ``"hex32"`` (8 lower-case hexadecimal digits),
            ``"uint32"``, ``"uint64"``, ``"int"`` (signed, 64 bits), ``"integral"`` (an integer that
            may be written 17850.0), ``"string"``, or ``"bins"`` (index of the number's bin). Times:
            ``"unix"`` (seconds since 1970), ``"unix_ms"``, ``"iso"`` (ISO 8601 without a zone,
            taken as UTC), ``"iso_zone"`` or ``"yymmddhh"``.
        transform: transform of a dense column or of a label that is a number, ``"log1p"`` =
            log(1 + max(x, 0)), or ``"none"``.
        source: alternative names of the column in the header or schema of files; empty = `name`.
        missing: strings that denote a missing field, in addition to the empty string; in a Parquet
            or JSON column of numbers, the numbers that they denote.
        threshold: smallest number that gives label 1, with ``parse="threshold"``.
        positive: strings that give label 1, with ``parse="among"``.
        multi: character between the ids of one field; empty = one id per field.
        bins: ascending lower bounds, with ``parse="bins"``; the id of x is the number of bounds
            <= x.
    """

    name: Text
    kind: Annotated[str, one_of(*KINDS)]
    parse: str = ""
    transform: Annotated[str, one_of(*TRANSFORMS)] = "none"
    source: tuple[Text, ...] = ()
    missing: tuple[Text, ...] = ()
    threshold: Finite = 1.0
    positive: tuple[Text, ...] = ()
    multi: str = ""
    bins: tuple[Finite, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Accepted names of the column in a header or schema."""
        return self.source or (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """The properties of a format that its `Layout` has besides columns.

    Attributes:
        format: ``"text"`` (delimited lines), ``"jsonl"`` (one JSON object per line), ``"bags"``
            (one user's items per line), ``"parquet"`` or ``"npy"`` (arrays of MLPerf's scripts).
        separator: text between the fields of a line: an ASCII character, or 2 to 4 equal ones.
        header: whether each file begins with a line of column names.
        quote: character around fields that contain separators; empty = none.
        escape: character before a quote inside quotes; empty = a quote is doubled.
        encoding: encoding of the text, ``"utf-8"`` or ``"latin-1"``.
        first: meaning of the first number of a line of bags: ``"count"``, ``"user"`` or ``"item"``.
        ask: whether the layout must be requested by name because files of another layout look the
            same.
        filter: conditions ``COLUMN OP VALUE`` on the rows of Parquet and text files, where OP is
            ==, !=, <, <=, > or >=. Rows that violate one are ignored; a missing field violates
            all. Strings are compared as numbers if they are to be less or more than a number. In
            text without a header, COLUMN is a name in the recipe.
    """

    format: Annotated[str, one_of(*FORMATS)] = "text"
    separator: str = "\t"
    header: bool = False
    quote: Character = ""
    escape: Character = ""
    encoding: Annotated[str, one_of(*ENCODINGS)] = "utf-8"
    first: Annotated[str, one_of("count", "user", "item")] = "item"
    ask: bool = False
    filter: tuple[Text, ...] = ()

    @property
    def counts_lines(self) -> bool:
        """Whether lines have no users, who are then the numbers of the lines."""
        return self.format == "bags" and self.first != "user"

    @property
    def options(self) -> dict[str, Any]:
        """The properties by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(LayoutOptions)}


@dataclass(frozen=True, slots=True)
class Layout(LayoutOptions):
    """A format that files of a data set may have, with the columns in it.

    Attributes:
        name: name for ``--layout`` and messages.
        columns: columns in the order of the file; with a header they are found by name.
    """

    name: str
    columns: tuple[Column, ...]

    def of(self, kind: str) -> tuple[Column, ...]:
        """Return the columns of one kind, in order."""
        return tuple(c for c in self.columns if c.kind == kind)


@dataclass(frozen=True, slots=True)
class Join:
    """A left join of the log with a side table, such as a table of items.

    Attributes:
        file: path of the side table, which is loaded into memory.
        key: name of the sparse column to join on. Keys in the side table are unique; rows of the
            log without a match get missing fields.
        layout: layout of the side table. Its column `key` has the keys; its other sparse and dense
            columns are added to the log's.
    """

    file: str
    key: str
    layout: Layout

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the side table that are added to the log's rows."""
        return tuple(c for c in self.layout.columns if c.kind != "skip" and c.name != self.key)


@dataclass(frozen=True, slots=True)
class Cross:
    """A sparse column of feature crosses: hashes of the combined values of several columns.

    Attributes:
        name: name of the column.
        of: names of the crossed sparse columns, each with one id per row.
        rows: number of hash buckets.
    """

    name: Text
    of: tuple[Text, ...]
    rows: Annotated[int, within(1, (1 << 31) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the rows of a data set are split.

    Attributes:
        by: ``"rows"``: the log is in time order and split by row numbers; ``"time"``: the log is
            sorted and split by its time column.
        valid: share of the rows for the validation part, between the training and the test part.
        test: share of the rows for the test part, at the end.
        buckets: number of time buckets, of equal numbers of rows (by rows) or equal length (by
            time).
        bucket_seconds: with ``by="time"``, length of a time bucket in seconds; the first bucket
            begins at midnight UTC. 0 = `buckets` defines the buckets.
        bucket_column: name of the column of time buckets in the output.
    """

    by: Annotated[str, one_of("rows", "time")] = "rows"
    valid: Share = Fraction(0)
    test: Share = Fraction(0)
    buckets: Annotated[int, within(1, 32767)] = 1
    bucket_seconds: Count = 0
    bucket_column: Text = "bucket"


@dataclass(frozen=True, slots=True)
class Recipe(Split):
    """How one data set is read.

    Attributes:
        name: name of the data set.
        title: title for display.
        layouts: possible layouts of its files, with the same label, dense and sparse columns.
        min_count: values seen fewer than `min_count` times in the training part share row 0.
        joins: side tables whose columns are added.
        crosses: feature crosses of the log's and joined columns.
    """

    name: str
    title: str
    layouts: tuple[Layout, ...]
    min_count: Positive = 2
    joins: tuple[Join, ...] = ()
    crosses: tuple[Cross, ...] = ()

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the first layout."""
        return self.layouts[0].columns

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names of the log's columns of one kind, without joins and crosses."""
        return tuple(c.name for c in self.columns if c.kind == kind)

    def _joined(self, kind: str) -> tuple[str, ...]:
        return tuple(c.name for join in self.joins for c in join.columns if c.kind == kind)

    @property
    def dense(self) -> tuple[str, ...]:
        """Names of all dense columns: those of the log, then joined ones."""
        return self.names("dense") + self._joined("dense")

    @property
    def sparse(self) -> tuple[str, ...]:
        """Names of all sparse columns: those of the log, then joined ones, then crosses."""
        return (self.names("sparse") + self._joined("sparse")
                + tuple(cross.name for cross in self.crosses))

    @property
    def label(self) -> str:
        """Name of the label column; ``"label"``, a column of ones, for a log without labels."""
        return (*self.names("label"), "label")[0]

    @property
    def time(self) -> str:
        """Name of the time column in the output; empty unless all layouts have a time column."""
        names = [layout.of("time") for layout in self.layouts]
        return names[0][0].name if all(names) else ""

    def layout(self, name: str) -> Layout:
        """Find a layout by name; raises InvalidInputError."""
        for layout in self.layouts:
            if layout.name == name:
                return layout
        raise InvalidInputError(f"cannot use recipe {self.name!r}", "layout", name,
                                f"one of {[x.name for x in self.layouts]}", "correct the name")


def load_recipe(name_or_path: str) -> Recipe:
    """Load the recipe of a data set by its name in ``datasets/``, or from the path of a TOML file.

    Raises:
        InvalidInputError: there is no such recipe, or the file is not a recipe.
        FileFormatError: the file is not TOML.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = datasets_root() / name_or_path / "recipe.toml"
    if not path.is_file():
        known = sorted(p.parent.name for p in datasets_root().glob("*/recipe.toml"))
        raise InvalidInputError(
            f"no such recipe: recipe={name_or_path!r}, expected a .toml file or one of "
            f"{', '.join([*known, 'csv', 'parquet'])}; choose one of them")
    value = read_toml(path, f"cannot read {str(path)!r} as a recipe")
    recipe = recipe_from_dict(value, f"invalid recipe {str(path)!r}")
    # Paths of side tables are relative to the recipe.
    return dataclasses.replace(recipe, joins=tuple(
        join if "://" in join.file else dataclasses.replace(join, file=str(path.parent / join.file))
        for join in recipe.joins))


_MAX_COLUMNS = 10_000  # per entry with numbered names


@dataclass(frozen=True, slots=True)
class _ColumnEntry(Column):
    """A ``[[column]]`` of a recipe: a column, or with `first` and `last` several, whose numbers
    replace ``{}`` in the name."""

    first: int | None = None
    last: int | None = None

    def to_columns(self, what: str) -> list[Column]:
        kind, parse = self.kind, self.parse or KINDS[self.kind][0]
        first, last = self.first, self.last
        is_one = first is None and last is None
        require(what, "correct this column", *(
            ("parse", parse, parse in KINDS[kind], f"one of {KINDS[kind]}"),
            ("transform", self.transform, self.transform == "none" or kind == "dense"
             or parse == "number", "'none' unless the column is dense or a label that is a number"),
            ("threshold, positive", (self.threshold, self.positive), parse != "number"
             or (self.threshold, self.positive) == (1.0, ()), 'neither with parse = "number"'),
            ("multi", self.multi, not self.multi or (len(self.multi) == 1 and kind == "sparse"),
             "a single character, only for a sparse column"),
            ("bins", self.bins, bool(self.bins) == (parse == "bins")
             and list(self.bins) == sorted(set(self.bins)), 'ascending numbers, with parse = "bins"'
             ),
            ("first, last", (first, last), is_one or (
                first is not None and last is not None and "{}" in self.name
                and 0 <= last - first < _MAX_COLUMNS),
             f"two integers, at most {_MAX_COLUMNS} columns, and a name with {{}}")))
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(Column)}
        names = [self.name] if first is None or last is None else [
            self.name.replace("{}", str(k)) for k in range(first, last + 1)]
        return [Column(**{**values, "name": name, "parse": parse}) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileEntry(LayoutOptions):
    """The columns of a file and its format."""

    column: tuple[_ColumnEntry, ...]

    def to_layout(self, what: str, name: str) -> Layout:
        columns = tuple(c for entry in self.column for c in entry.to_columns(what))
        return Layout(name, columns, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayoutEntry(_FileEntry):
    """A ``[[layout]]`` of a recipe."""

    name: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoinEntry(_FileEntry):
    """A ``[[join]]`` of a recipe, by default with a CSV file."""

    file: Text
    key: Text
    on: Text | None = None
    separator: str = ","
    header: bool = True
    quote: Character = '"'

    def to_join(self, what: str, log: Layout) -> Join:
        """Return the join with a log."""
        key, layout = self.key, self.to_layout(what, "join")
        held = [c for c in log.columns if c.name == key and c.kind == "sparse" and not c.multi]
        require(what, "name such a column", (
            "key of a join", key, len(held) == 1, "a sparse column with one id per row, one of "
            f"{[c.name for c in log.of('sparse') if not c.multi]}"))
        if not any(c.name == key for c in layout.columns):
            column = dataclasses.replace(held[0], source=(self.on or key,))
            layout = dataclasses.replace(layout, columns=(column, *layout.columns))
        return Join(self.file, key, layout)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The section ``[vocabulary]`` of a recipe."""

    min_count: Positive = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecipeEntry(_LayoutEntry):
    """A recipe file: layouts, or the columns and options of the only one."""

    title: Text | None = None
    column: tuple[_ColumnEntry, ...] = ()
    layout: tuple[_LayoutEntry, ...] = ()
    split: Split = Split()
    vocabulary: _Vocabulary = _Vocabulary()
    join: tuple[_JoinEntry, ...] = ()
    cross: tuple[Cross, ...] = ()


def recipe_from_dict(value: dict[str, Any], what: str = "invalid recipe") -> Recipe:
    """Make a recipe from a parsed TOML file; raises InvalidInputError for invalid fields.

    The file has a ``name`` and either ``column`` tables, if there is one layout, or ``layout``
    tables, each with its own name and columns. `what` begins error messages.
    """
    entry = Reader(lambda name, value, expected: InvalidInputError(
        what, name, value, expected, "correct the recipe")
                   ).build(_RecipeEntry, value)
    own = sorted({"column", *entry.options} & set(value))
    require(what, "write them into every [[layout]]", (
        "column and options of a layout", own, "layout" not in value or not own,
        "none together with [[layout]]"))
    layouts = tuple(x.to_layout(what, x.name) for x in entry.layout) if "layout" in value else (
        entry.to_layout(what, "default"),)
    require(what, "add a layout", ("layouts", layouts, bool(layouts), "at least one"))
    recipe = Recipe(
        entry.name, entry.title or entry.name, layouts, **dataclasses.asdict(entry.split),
        min_count=entry.vocabulary.min_count,
        joins=tuple(x.to_join(what, layouts[0]) for x in entry.join), crosses=entry.cross)
    _check(what, recipe)
    return recipe


_CONDITION = re.compile(r"\s*(.+?)\s*(==|!=|<=|>=|<|>)\s*(.*?)\s*")


def condition(text: str) -> tuple[str, str, str] | None:
    """Parse ``COLUMN OP VALUE`` into its three parts; None if `text` has another form."""
    found = _CONDITION.fullmatch(text)
    return (found[1], found[2], found[3]) if found else None


def conditions(layout: Layout) -> list[tuple[str, str, str]]:
    """Return (column, operator, value) of each condition of a layout's filter."""
    return [found for text in layout.filter if (found := condition(text))]


def finite(text: str) -> float | None:
    """Parse a finite number; None for other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


_MAX_NAME_BYTES = 200  # per column name, since files are named after columns
_NAMES = f"names without '/', of at most {_MAX_NAME_BYTES} bytes, since files are named after them"


def _check(what: str, recipe: Recipe) -> None:
    """Raise InvalidInputError if a recipe contradicts itself; `what` begins the message."""
    written = [recipe.label, recipe.bucket_column, *([recipe.time] if recipe.time else []),
               *recipe.dense, *recipe.sparse]
    twice = sorted({n for n in written if written.count(n) > 1})
    own = {"labels": recipe.label, "time buckets": recipe.bucket_column, "times": recipe.time}
    require(what, "rename the column, in a recipe file by setting name and source",
            ("columns named twice", twice, not twice, "unique names; " + ", ".join(
                f"{name!r} has the {kind}" for kind, name in own.items() if name)))
    checks: list[tuple[str, object, bool, str]] = [
        ("layouts", [x.name for x in recipe.layouts],
         len({x.name for x in recipe.layouts}) == len(recipe.layouts), "unique names"),
        ("valid + test", recipe.valid + recipe.test, recipe.valid + recipe.test < 1, "below 1"),
        ("bucket_seconds", recipe.bucket_seconds,
         recipe.by == "time" or not recipe.bucket_seconds, "0 unless by = 'time'"),
    ]
    outputs = [tuple(c.name for k in ("label", "dense", "sparse") for c in x.of(k))
               for x in recipe.layouts]
    derived = [*(c.name for join in recipe.joins for c in join.columns),
               *(cross.name for cross in recipe.crosses)]
    one_id_each = {n for n in recipe.sparse if n not in {c.name for c in recipe.crosses}} - {
        c.name for c in (*recipe.columns, *(c for j in recipe.joins for c in j.columns)) if c.multi}
    checks += [
        ("columns", derived, not any(set(n) & set("/\0") or len(n.encode()) > _MAX_NAME_BYTES
                                     for n in derived), _NAMES),
        ("kinds of joined columns", [c.kind for j in recipe.joins for c in j.columns],
         all(c.kind in ("sparse", "dense") for j in recipe.joins for c in j.columns),
         "only sparse and dense"),
        ("cross", [(c.of, c.rows) for c in recipe.crosses], all(
            len(c.of) > 1 and set(c.of) <= one_id_each for c in recipe.crosses),
         "two or more sparse columns with one id per row"),
    ]
    for layout, output in zip(recipe.layouts, outputs, strict=True):
        checks += [*_layout_checks(layout, recipe), (
            "columns", output, sorted(output) == sorted(outputs[0]),
            "the same label, dense and sparse columns in every layout")]
    require(what, "correct the recipe", *checks)


def _layout_checks(layout: Layout, recipe: Recipe) -> list[tuple[str, object, bool, str]]:
    names = [c.name for c in layout.columns if c.kind != "skip"] + [recipe.bucket_column]
    labels, times = layout.of("label"), layout.of("time")
    separator = layout.separator
    return [
        ("separator", separator, separator.isascii() and 1 <= len(separator) <= 4
         and not set(separator) & set("\n\r\0\"") and (len(separator) == 1 or not layout.quote)
         and (len(separator) == 1 or len(set(separator)) == 1),
         "an ASCII character, or without quotes up to 4 equal ones"),
        ("columns", names, len(set(names)) == len(names), "unique names"),
        ("columns", names, not any(set(n) & set("/\0") or len(n.encode()) > _MAX_NAME_BYTES
                                   for n in names), _NAMES),
        ("labels", [c.name for c in labels], len(labels) <= 1, "at most one label column"),
        ("sparse", layout.columns and [c.name for c in layout.of("sparse")],
         bool(layout.of("sparse")), "at least one"),
        ("columns of bags", names[:-1], layout.format != "bags" or all(
            c.kind == "sparse" and c.name in ("user", "item")
            for c in layout.columns if c.kind != "skip"),
         "only the sparse columns 'user' and 'item'"),
        ("time", [c.name for c in times], len(times) == 1 or recipe.by == "rows",
         "one time column, since by = 'time'"),
        ("filter", layout.filter, not layout.filter or (
            layout.format in ("parquet", "text") and all(map(condition, layout.filter))
            and (layout.header or layout.format == "parquet" or {
                n for n, _, _ in conditions(layout)} <= {
                s for c in layout.columns if c.kind != "skip" for s in (c.name, *c.sources)})),
         "COLUMN OP VALUE, for Parquet or text files; without a header, COLUMN is in the recipe"),
    ]
