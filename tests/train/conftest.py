"""A small preprocessed log and its statistics, made once."""

from pathlib import Path
from typing import NamedTuple

import pytest

from oper.data import (
    PreprocessOptions,
    SyntheticLog,
    analyze_folder,
    load_recipe,
    preprocess,
    write_synthetic_log,
)


class Prepared(NamedTuple):
    """Paths of the preprocessed folder and of its statistics."""

    folder: str
    stats: str


def prepare(root: Path, log: SyntheticLog, options: PreprocessOptions | None = None) -> Prepared:
    """Generate, preprocess and analyze a log."""
    write_synthetic_log(root / "log.txt", log)
    preprocess(load_recipe("criteo-kaggle"), [str(root / "log.txt")], root / "data",
               options or PreprocessOptions())
    analyze_folder(root / "data").save(root / "stats")
    return Prepared(str(root / "data"), str(root / "stats"))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("log"), SyntheticLog(
        8_000, 3, tuple(5 + 37 * k for k in range(26)), effect=2.5))
