"""The specification of a preprocessing job: the log, how it is read, and the output."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from oper.data.folder import FOLDER_VERSION
from oper.data.preprocessing.options import PreprocessOptions
from oper.data.preprocessing.workfolder import work_folder
from oper.data.reading import store
from oper.data.reading.lines import Unit
from oper.data.recipe import Recipe, parse_share
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
    """

    recipe: Recipe
    paths: list[str]
    units: list[Unit]
    target: Path
    options: PreprocessOptions
    finished: FinishedVocabulary | None = None

    @property
    def work(self) -> Path:
        return work_folder(self.target)

    @property
    def shares(self) -> tuple[Fraction, Fraction]:
        """Shares of the log that become the validation and the test part.

        Raises:
            InvalidInputError: an option is not a valid share, or the sum of both is not below 1.
        """
        found = []
        for name in ("valid", "test"):
            value = getattr(self.options, name)
            found.append(getattr(self.recipe, name) if value is None else parse_share(
                value, "cannot split the log", name))
        require("cannot split the log", "lower the shares",
                ("valid + test", str(sum(found)), sum(found) < 1, "below 1"))
        return found[0], found[1]

    @property
    def min_count(self) -> int:
        """Least count of a value with its own row; rarer values share row 0."""
        if self.finished is not None:
            return self.finished.min_count
        return self.options.min_count or self.recipe.min_count

    def identity(self) -> str:
        """Return a digest of everything that determines the contents of the output."""
        options, files = self.options, [*self.paths, *(join.file for join in self.recipe.joins)]
        about = [FOLDER_VERSION, asdict(self.recipe), [asdict(u) for u in self.units],
                 [(store.full_name(p), *store.stamp(p)) for p in files],
                 [str(x) for x in self.shares], self.min_count, options.max_bad, options.max_rows,
                 options.hash_rows, options.raw_ids, options.row_group_rows, options.part_rows,
                 options.compression, self.finished and self.finished.digest]
        return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:32]
