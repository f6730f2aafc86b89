"""The specification of a preprocessing job: the log, how it is read, and the output."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path

from oper.data.folder import FOLDER_VERSION
from oper.data.preprocessing.options import PreprocessOptions
from oper.data.preprocessing.workfolder import work_folder
from oper.data.reading import store
from oper.data.reading.lines import Unit
from oper.data.reading.readers import companions
from oper.data.recipe import Recipe
from oper.data.vocabulary.finished import FinishedVocabulary
from oper.errors import require


@dataclass(slots=True)
class JobSpec:
    """Everything that determines the output of a preprocessing job.

    Attributes:
        recipe: how the log is read.
        paths: the files of the log, in order.
        units: the files or parts of files that are read as one task each, in order.
        target: the output folder.
        options: how the log is preprocessed.
        finished: the vocabulary that is applied; None = build one.
        stamps: size and modification time of every file that is read (`store.stamp`), by path, when
            the job was made.
    """

    recipe: Recipe
    paths: list[str]
    units: list[Unit]
    target: Path
    options: PreprocessOptions
    finished: FinishedVocabulary | None = None
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.stamps:
            arrays = [name for u in self.units if self.recipe.layout(u.layout).format == "npy"
                      and not store.is_url(u.path) for name in companions(u.path)]
            files = [*self.paths, *arrays, *(join.file for join in self.recipe.joins)]
            self.stamps = {path: _stamp(path) for path in files}

    def check_unchanged(self) -> None:
        """Raise InvalidInputError if a file has changed since the job was made."""
        changed = [p for p, stamp in self.stamps.items() if _stamp(p) != stamp]
        require("cannot preprocess", "run the command again once they are complete",
                ("inputs that changed while they were read", changed[:8], not changed, "none"))

    @property
    def work(self) -> Path:
        return work_folder(self.target)

    @property
    def shares(self) -> tuple[Fraction, Fraction]:
        """Shares of the log that become the validation and the test part; raises as
        `PreprocessOptions.shares`."""
        return self.options.shares(self.recipe.valid, self.recipe.test)

    @property
    def min_count(self) -> int:
        """Least count of a value with its own row; rarer values share row 0."""
        if self.finished is not None:
            return self.finished.min_count
        return self.options.min_count or self.recipe.min_count

    def identity(self) -> str:
        """Return a digest of everything that determines the contents of the output."""
        options = self.options
        about = [FOLDER_VERSION, asdict(self.recipe), [asdict(u) for u in self.units],
                 [(store.full_name(p), *stamp) for p, stamp in self.stamps.items()],
                 [str(x) for x in self.shares], self.min_count, options.max_bad, options.max_rows,
                 options.hash_rows, options.raw_ids, options.row_group_rows, options.part_rows,
                 options.compression, self.finished and self.finished.digest]
        return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:32]


def _stamp(path: str) -> tuple[int, int]:
    """Return `store.stamp`, or (-1, 0) for a missing file, which readers report."""
    try:
        return store.stamp(path)
    except FileNotFoundError:
        return -1, 0
