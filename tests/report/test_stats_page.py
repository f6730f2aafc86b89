"""Pages of statistics and benchmark records, also in a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from oper.analysis import Collector
from oper.cli import main
from oper.data.generator import workload_from_dict
from oper.data.lookups import count_workload
from oper.errors import FileFormatError
from oper.report.stats_page import bench_page, load_record, stats_page
from oper.stats import AccessStats
from oper.tables import TableSpec

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.fixture
def stats() -> AccessStats:
    spec = {"days": 3, "table": [
        {"name": "<b>a&b", "rows": 5000, "exponent": 1.1, "lengths": [0, 2, 9],
         "weights": [1, 1, 1]}, {"name": "c", "rows": 50}]}
    return count_workload(workload_from_dict(spec), 6000)


def check_page(page: str) -> None:
    """Complete in itself: nothing is fetched, no script runs."""
    assert not re.search(r"<script|https?://|\bsrc=|<link|@import|url\((?!#)", page)
    assert page.count("<html") == 1 and "prefers-color-scheme: dark" in page


def test_statistics(stats: AccessStats) -> None:
    page = stats_page(stats)
    check_page(page)
    for heading in ("cover", "How often", "Distinct rows", "Bag lengths", "Drift"):
        assert heading in page
    assert page.count("<svg") == 5 and "&lt;b&gt;a&amp;b" in page and "<b>" not in page
    assert f"{stats.tables['c'].num_accesses:,}" in page
    collector = Collector([TableSpec("t", 5, 4, ("t",))])
    collector.add({"t": np.array([1, 1, 2])})
    check_page(stats_page(collector.finish()))  # nothing but one-hot bags, no days


def test_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"benchmark": "data", "command": "oper bench data", "versions": {"oper": "1"},
              "machine": {"cpu": "x<y", "cores": 2},
              "cases": [{"name": "one", "verified": True, "rate": 5.0, "only": 1},
                        {"name": "two", "verified": False, "rate": 7}]}
    page = bench_page(record)
    check_page(page)
    assert page.count("<svg") == 1 and "x&lt;y" in page and "<td>7</td>" in page
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record))
    assert main(["report", "bench", str(path), "--html", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text() == bench_page(load_record(path))
    for text in ("{", "[]", '{"benchmark": "x", "cases": [1]}', '{"benchmark": "", "cases": []}'):
        path.write_text(text)
        with pytest.raises(FileFormatError):
            load_record(path)


def ink(path: Path, width: int) -> tuple[float, float]:
    """Mean brightness of a screenshot, and the share of its pixels that differ from the ground."""
    from matplotlib import image

    pixels = image.imread(path)[..., :3]
    assert pixels.shape[1] == width
    ground = pixels[2, 2]
    return float(pixels.mean()), float((np.abs(pixels - ground).max(axis=2) > 0.1).mean())


@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chromium-headless-shell")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_in_a_browser(tmp_path: Path, stats: AccessStats, width: int, dark: bool) -> None:
    page = tmp_path / "page.html"
    # The page tells its own layout: how wide the content is, how large the plots are.
    probe = ("<script>addEventListener('load', () => { document.title = JSON.stringify([document."
             "documentElement.scrollWidth, [...document.querySelectorAll('svg')].map(s => "
             "s.getBoundingClientRect().width)]); })</script></body>")
    page.write_text(stats_page(stats).replace("</body>", probe))
    shot = tmp_path / "shot.png"
    common = [str(BROWSER), "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
              f"--window-size={width},3200", f"--user-data-dir={tmp_path / 'profile'}",
              *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
    subprocess.run([*common, f"--screenshot={shot}", page.as_uri()], check=True, timeout=60,
                   capture_output=True)
    dom = subprocess.run([*common, "--dump-dom", page.as_uri()], check=True, timeout=60,
                         capture_output=True, text=True).stdout
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found is not None
    scroll, plots = json.loads(found[1])
    brightness, covered = ink(shot, width)
    assert scroll <= width + 1, "nothing sticks out to the side"
    assert len(plots) == 5 and all(480 <= w <= max(width, 480) for w in plots)
    assert covered > 0.01, "there is something to see"
    assert (brightness < 0.75) if dark else (brightness > 0.85)
