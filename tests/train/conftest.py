"""A small preprocessed log and its statistics, made once."""

from pathlib import Path
from typing import NamedTuple

import pytest

from oper.data import (
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


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    root: Path = tmp_path_factory.mktemp("log")
    cardinalities = tuple(5 + 37 * k for k in range(26))
    write_synthetic_log(root / "log.txt", SyntheticLog(8_000, 3, cardinalities, effect=2.5))
    preprocess(load_recipe("criteo-kaggle"), [str(root / "log.txt")], root / "data")
    analyze_folder(root / "data").save(root / "stats")
    return Prepared(str(root / "data"), str(root / "stats"))
