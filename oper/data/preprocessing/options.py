"""Options of preprocessing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from oper.data.recipe import parse_share
from oper.errors import require, require_fields
from oper.ranges import Count, Positive, Rule, one_of, rules_of

Rows = Annotated[int, Rule(lambda x: x >= 2, ">= 2, row 0 and another one")]


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """Options of preprocessing, checked on creation (InvalidInputError).

    Attributes:
        min_count: values seen fewer than `min_count` times in the training part share row 0; None =
            the recipe's.
        valid, test: shares of the rows, in [0, 1), for the validation and the test part, which
            follow the training part in this order; None = the recipe's.
        max_bad: number of malformed rows that may be left out and reported; more are an error.
        max_rows: maximum number of rows per table, row 0 included; None = no limit.
        hash_rows: rows of each table, if values are hashed; None = build vocabularies.
        vocabulary: a folder whose vocabulary is applied instead of building one: an earlier output,
            or the output of ``oper vocabulary extend``. Values that it lacks share row 0, and
            ``unseen/COLUMN.parquet`` lists those of the training part.
        raw_ids: keep ids as 64-bit keys for dynamic tables, without a vocabulary: integers
            unchanged, strings as 64-bit hashes (see `oper.data.vocabulary.raw_keys`).
        layout: name of the files' layout in the recipe; None = detect.
        force: replace an earlier output, or unfinished work with other settings.
        num_workers: number of processes on this machine.
        num_ray_workers: number of additional processes on a Ray cluster that shares the file
            system.
        row_group_rows: rows of a Parquet row group.
        part_rows: rows after which a new Parquet file is begun.
        compression: compression of the Parquet files, ``"none"`` (fastest to read) or ``"zstd"``
            (about a third as large).
        unit_bytes: approximate bytes of text per unit of work; larger text files, plain or gzip,
            are split unless fields are quoted.
        check_disk: raise if the disk is estimated to be too small.
        show_progress: show a progress bar on stderr.
    """

    min_count: Positive | None = None
    valid: str | Fraction | None = None
    test: str | Fraction | None = None
    max_bad: Count = 0
    max_rows: Rows | None = None
    hash_rows: Rows | None = None
    vocabulary: str | os.PathLike[str] | None = None
    raw_ids: bool = False
    layout: str | None = None
    force: bool = False
    num_workers: Positive = 1
    num_ray_workers: Count = 0
    row_group_rows: Positive = 1 << 16
    part_rows: Positive = 1 << 21
    compression: Annotated[str, one_of("none", "zstd")] = "none"
    unit_bytes: Positive = 1 << 28
    check_disk: bool = True
    show_progress: bool = False

    @property
    def id_bytes(self) -> int:
        """Bytes of an id in the output."""
        return 8 if self.raw_ids else 4

    def shares(self, valid: Fraction, test: Fraction) -> tuple[Fraction, Fraction]:
        """Return the shares of the validation and the test part. `valid` and `test`: those of the
        recipe.

        Raises:
            InvalidInputError: an option is not a valid share, or the sum of both is not below 1.
        """
        what = "cannot split the log"
        if self.valid is not None:
            valid = parse_share(self.valid, what, "valid")
        if self.test is not None:
            test = parse_share(self.test, what, "test")
        require(what, "lower the shares",
                ("valid + test", str(valid + test), valid + test < 1, "below 1"))
        return valid, test

    def __post_init__(self) -> None:
        what = "cannot preprocess"
        require_fields(
            self, what, "choose another value", *rules_of(self),
            ("hash_rows", self.hash_rows is None
             or (self.max_rows is None and self.hash_rows <= 2**31 - 1),
             "below 2^31 and without max_rows"))
        self.shares(Fraction(0), Fraction(0))
        own: dict[str, object] = {n: v for n in ("min_count", "max_rows", "hash_rows")
                                  if (v := getattr(self, n))}
        require(what, "leave them out: the finished vocabulary determines them",
                ("options with a vocabulary", own, self.vocabulary is None or not own,
                 "none of them"))
        given = own | ({} if self.vocabulary is None else {"vocabulary": self.vocabulary})
        require(what, "leave them out: raw ids have no vocabulary",
                ("options with raw_ids", given, not self.raw_ids or not given, "none of them"))
