"""Tests that tests/schedule.py lists exist."""

import re

from tests.schedule import ALONE, NIGHTLY, RANDOM_PROBLEMS
from tests.support import ROOT


def test_listed_tests_exist() -> None:
    assert all((ROOT / path).exists() for path in ALONE)
    for test in (*(n.test for n in NIGHTLY), *RANDOM_PROBLEMS):
        path, _, name = test.partition("::")
        assert not name or re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), test
