"""A recipe: which columns a raw log has, how they are read, and how the log is split."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from oper.errors import InvalidInputError, fail

KINDS = {  # kind of column: ways to parse it, the first one being the default
    "label": ("binary",),
    "dense": ("int",),
    "sparse": ("hex32", "uint32"),
    "skip": ("",),
}
TRANSFORMS = ("log1p", "none")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a raw log.

    Attributes:
        name: its name in the output.
        kind: ``"label"``, ``"dense"``, ``"sparse"`` or ``"skip"``.
        parse: ``"binary"`` (0 or 1), ``"int"`` (decimal), ``"hex32"`` (8 lower-case hexadecimal
            digits) or ``"uint32"`` (decimal, below 2^32).
        transform: of a dense column: ``"log1p"`` = log(1 + max(x, 0)), or ``"none"``.
    """

    name: str
    kind: str
    parse: str = ""
    transform: str = "none"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one data set is read.

    Attributes:
        name: the data set.
        title: for a person.
        columns: in the order of the file.
        separator: one character.
        header: whether each file begins with a line of column names.
        valid: share of the rows, at the end, that is the validation part.
        buckets: time buckets of equally many rows.
        bucket_column: name of the bucket's column in the output.
        min_count: values seen less often in the training part share row 0.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    separator: str = "\t"
    header: bool = False
    valid: Fraction = Fraction(0)
    buckets: int = 1
    bucket_column: str = "bucket"
    min_count: int = 2

    def names(self, kind: str) -> tuple[str, ...]:
        """Names of the columns of one kind, in order."""
        return tuple(c.name for c in self.columns if c.kind == kind)


def parse_share(value: object, what: str, name: str) -> Fraction:
    """A share in [0, 1) from text such as ``"1/7"`` or ``"0.1"``; raises InvalidInputError."""
    try:
        share = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share < 1:
        raise InvalidInputError(
            fail(what, name, value, "a share from 0 to below 1, e.g. '1/7'", "correct it"))
    return share


def recipe_folder() -> Path:
    """The folder of the recipes that come with the package."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "datasets"
    return installed if installed.is_dir() else package.parent / "datasets"


def load_recipe(name_or_path: str) -> Recipe:
    """The recipe of a data set by name, or from a TOML file.

    Raises:
        InvalidInputError: no such recipe, or a file that is not one.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = recipe_folder() / name_or_path / "recipe.toml"
    if not path.is_file():
        known = sorted(p.parent.name for p in recipe_folder().glob("*/recipe.toml"))
        raise InvalidInputError(
            fail("no such recipe", "recipe", name_or_path, f"one of {known} or a .toml file",
                 "correct the name"))
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            fail("cannot read a recipe", "path", str(path), "a TOML file", str(error))) from None
    return recipe_from_dict(value, f"invalid recipe {str(path)!r}")


def recipe_from_dict(value: dict[str, Any], what: str = "invalid recipe") -> Recipe:
    """The recipe of a parsed TOML file; raises InvalidInputError on unknown or bad fields."""
    _check_keys(what, value, {"name", "column"},
                {"title", "separator", "header", "split", "vocabulary"})
    split, vocabulary = value.get("split", {}), value.get("vocabulary", {})
    _check_keys(what, split, set(), {"valid", "buckets", "bucket_column"})
    _check_keys(what, vocabulary, set(), {"min_count"})
    entries = value["column"] if isinstance(value["column"], list) else [value["column"]]
    columns = tuple(c for entry in entries for c in _columns(what, entry))
    recipe = Recipe(
        name=str(value["name"]), title=str(value.get("title", value["name"])), columns=columns,
        separator=value.get("separator", "\t"), header=bool(value.get("header", False)),
        valid=parse_share(split.get("valid", "0"), what, "valid"),
        buckets=split.get("buckets", 1), bucket_column=str(split.get("bucket_column", "bucket")),
        min_count=vocabulary.get("min_count", 2))
    _check(what, recipe)
    return recipe


def _columns(what: str, entry: Any) -> list[Column]:
    _check_keys(what, entry, {"name", "kind"}, {"first", "last", "parse", "transform"})
    kind = entry["kind"]
    if kind not in KINDS:
        raise InvalidInputError(fail(what, "kind", kind, f"one of {tuple(KINDS)}", "correct it"))
    parse, transform = entry.get("parse", KINDS[kind][0]), entry.get("transform", "none")
    if parse not in KINDS[kind]:
        raise InvalidInputError(fail(what, "parse", parse, f"one of {KINDS[kind]}", "correct it"))
    if transform not in TRANSFORMS or (transform != "none" and kind != "dense"):
        raise InvalidInputError(
            fail(what, "transform", transform, f"one of {TRANSFORMS}, of a dense column",
                 "correct it"))
    names = [str(entry["name"])]
    if "first" in entry or "last" in entry:
        first, last = entry.get("first"), entry.get("last")
        if not isinstance(first, int) or not isinstance(last, int) or "{}" not in names[0]:
            raise InvalidInputError(
                fail(what, "first, last", (first, last), "two integers and a name with {}",
                     "correct it"))
        names = [names[0].format(k) for k in range(first, last + 1)]
    return [Column(name, kind, parse, transform) for name in names]


def _check(what: str, recipe: Recipe) -> None:
    names = [c.name for c in recipe.columns if c.kind != "skip"] + [recipe.bucket_column]
    checks: tuple[tuple[str, object, bool, str], ...] = (
        ("separator", recipe.separator,
         isinstance(recipe.separator, str) and len(recipe.separator) == 1
         and recipe.separator.isascii() and recipe.separator not in "\n\r",
         "one ASCII character"),
        ("columns", names, len(set(names)) == len(names), "unique names"),
        ("labels", recipe.names("label"), len(recipe.names("label")) == 1, "one label column"),
        ("sparse", recipe.names("sparse"), bool(recipe.names("sparse")), "at least one"),
        ("buckets", recipe.buckets,
         isinstance(recipe.buckets, int) and 1 <= recipe.buckets <= 127, "1..127"),
        ("min_count", recipe.min_count,
         isinstance(recipe.min_count, int) and recipe.min_count >= 1, "an integer >= 1"),
    )
    for name, value, ok, expected in checks:
        if not ok:
            raise InvalidInputError(fail(what, name, value, expected, "correct the recipe"))


def _check_keys(what: str, value: Any, needed: set[str], optional: set[str]) -> None:
    keys = set(value) if isinstance(value, dict) else None
    if keys is None or needed - keys or keys - needed - optional:
        raise InvalidInputError(
            fail(what, "keys", sorted(keys) if keys is not None else value,
                 f"{sorted(needed)} and at most {sorted(optional)}", "correct the recipe"))
