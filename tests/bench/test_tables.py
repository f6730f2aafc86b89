"""The generated tables of the pages equal the records."""

import re
import sys

import pytest

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import tables


def test_pages_equal_the_records() -> None:
    marked = [name for page in tables.PAGES
              for name in re.findall(r"<!-- records: ([\w-]+) -->", page.read_text())]
    assert sorted(marked) == sorted(tables.TABLES)
    for page in tables.PAGES:
        assert tables.rendered(page.read_text()) == page.read_text(), "run benchmarks/tables.py"


def test_a_changed_record_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = tables.PAGES[1].read_text()
    before = tables.load("faults")
    before["cases"][0]["outcomes"][0]["kept"] = False
    monkeypatch.setattr(tables, "load", lambda name: before)
    assert "| 80 | 79 |" in tables.rendered(page) and "| 80 | 79 |" not in page


def test_a_record_of_two_machines_names_both() -> None:
    row, = (line for line in tables.records().splitlines() if "`cluster.json`" in line)
    cases = tables.load("cluster")["cases"]
    others = [c["machine"]["cpu"] for c in cases if "machine" in c]
    assert f"{others[0]}, 2 cores ({len(others)} cases)" in row
    assert f"{tables.load('cluster')['machine']['cpu']}, 2 cores ({len(cases) - len(others)}" in row
