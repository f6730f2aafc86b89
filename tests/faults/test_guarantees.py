"""Every guarantee in `docs/explanation/reliability.md` names tests, and these tests exist."""

from __future__ import annotations

import re

from tests.support import ROOT

_NAMED = re.compile(r"`([^`]+)`")


def _guarantees() -> list[tuple[str, list[str]]]:
    """Return the guarantees, each with the names of its tests."""
    page = (ROOT / "docs" / "explanation" / "reliability.md").read_text()
    table = page.split("## Guarantees", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [(row[0].strip(), _NAMED.findall(row[-1])) for row in rows[1:]]


def test_every_guarantee_names_existing_tests() -> None:
    guarantees = _guarantees()
    assert len(guarantees) > 15
    for guarantee, names in guarantees:
        file = "tests/faults/test_faults.py"  # of names without a file before them
        assert names, guarantee
        for name in names:
            if name.startswith("["):  # another case of the test before it
                continue
            if ".py" in name:
                file, _, name = name.partition("::")
            test, text = name.partition("[")[0], (ROOT / file).read_text()
            assert f"def {test}(" in text if test else "def test_" in text, (
                f"{guarantee}: no test {name!r} in {file}")
