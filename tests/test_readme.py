"""What the README shows runs as it stands there."""

from __future__ import annotations

import re

import pytest
import torch

from oper import cli
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    pytest.importorskip("torchrec")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module)
    assert set(model.state_dict()) == {"embedding_bags.item.weight"}
    assert type(model).__module__.startswith("oper.")


def test_the_commands_exist() -> None:
    verbs = re.findall(r"^oper (\w+)", README, re.M)
    assert verbs
    assert set(verbs) <= set(cli.VERBS)


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    named = set(re.findall(r"`?make ([\w-]+)", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert {"demo", "test", "setup"} <= named
    assert named - {"again"} <= targets


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
