"""Pages of statistics and benchmark records, also in a browser if one is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from oper.analysis import Collector, distance
from oper.cli import main
from oper.data.generate.generator import workload_from_dict
from oper.data.generate.lookups import count_workload
from oper.errors import FileFormatError, InvalidInputError
from oper.report.bench_page import bench_page, load_record
from oper.report.drift_page import drift_page, drifts
from oper.report.plan_page import page as plan_page
from oper.report.run_page import load_metrics, run_page
from oper.report.stats_page import stats_page
from oper.search import make_plan, make_problem
from oper.search.problem.presets import topology_preset
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from tests.support import check_page

BROWSER = next(filter(None, map(shutil.which, (
    "chromium-headless-shell", "chromium", "google-chrome"))), None)


@pytest.fixture(scope="module")
def stats() -> AccessStats:
    spec = {"days": 3, "table": [
        {"name": "<b>a&b", "rows": 5000, "exponent": 1.1, "lengths": [0, 2, 9],
         "weights": [1, 1, 1]}, {"name": "c", "rows": 50}]}
    return count_workload(workload_from_dict(spec), 6000)


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


def test_runs(tmp_path: Path) -> None:
    """Static and dynamic tables, before and after the end; a run that is writing a line."""
    path = tmp_path / "metrics.jsonl"
    line = {"event": "train", "step": 5, "loss": 0.7, "samples_per_s": 1e4, "time": 1.0,
            "phases": {"forward": {"sum_s": 0.5}}}
    path.write_text(json.dumps(line) + "\n" + '{"event": "tra')
    page = run_page(load_metrics(tmp_path), "<b>run")
    check_page(page)
    assert "&lt;b&gt;run" in page and page.count("<svg") == 2 and "Dynamic" not in page
    keys = {f"t{k}": {"occupancy": 0.25 * k, "full_buckets": 0.5, "admitted": 30 + k, "evicted": 2,
                      "expired": 0, "refused": 1, "lookups": 100 - k, "default_share": 0.125}
            for k in range(12)}
    path.write_text("".join(json.dumps(x) + "\n" for x in (
        line | {"keys": keys}, {"event": "valid", "step": 5, "auc": 0.61, "log_loss": 0.5,
                                "samples": 9, "time": 1.0, "default_share": {"t3": 0.0625}},
        line | {"step": 10, "loss": None, "keys": keys},
        {"event": "end", "steps": 10, "auc": None, "log_loss": 0.4, "time": 2.0})))
    page = run_page(load_metrics(tmp_path), "run")
    check_page(page)
    for text in ("For the 10 tables", "66", "6.25%", "12.50%", "0.61", "table"):
        assert text in page
    assert page.count("<svg") == 4
    for text in ("", "{}\n", "[1]\n", '{"event": "end"}\n', "x\n", '{"event": "train"}\n'):
        path.write_text(text)
        with pytest.raises(FileFormatError, match="train lines"):
            load_metrics(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_metrics(tmp_path / "nowhere")


def test_odd_tables_are_shown_or_left_out() -> None:
    names = ["$\\bad$", "_hidden", "x" * 100, "never", "one"]
    collector = Collector([TableSpec(n, 1 if n == "one" else 4, 4, (n,)) for n in names])
    collector.add({n: (np.zeros(0, np.int64), np.zeros(3, np.int32)) if n == "never"
                   else np.array([0, 0, 0]) for n in names})
    page = stats_page(collector.finish())
    check_page(page)
    plots = page[page.index("<svg"):page.rindex("</svg>")]
    assert all(n in plots for n in ("$\\bad$", "_hidden", "x" * 47 + "\u2026"))
    assert "x" * 48 not in plots and "never" not in plots and "never" in page
    assert "#cc79a7" not in plots and plots.count("#56b4e9") > 2  # four curves, one a point
    nothing = Collector([TableSpec("t", 5, 4, ("t",))])
    nothing.add({"t": (np.zeros(0, np.int64), np.zeros(3, np.int32))})
    page = stats_page(nothing.finish())
    check_page(page)
    assert "<svg" not in page and "All tables" in page


def test_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"benchmark": "data", "command": "oper bench data", "versions": {"oper": "1"},
              "machine": {"cpu": "x<y", "cores": 2},
              "cases": [{"name": "one", "verified": True, "rate": 5.0, "only": 1},
                        {"name": "two", "verified": False, "rate": 7}]}
    page = bench_page(record)
    check_page(page)
    assert page.count("<svg") == 1 and "x&lt;y" in page and '<td class="number">7</td>' in page
    assert "two (not verified)" in page
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record))
    assert main(["report", "bench", str(path), "--html", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text() == bench_page(load_record(path))
    for text in ("{", "[]", '{"benchmark": "x", "cases": [1]}', '{"benchmark": "", "cases": []}',
                 '{"benchmark": "x", "cases": [], "machine": []}'):
        path.write_text(text)
        with pytest.raises(FileFormatError):
            load_record(path)


RECORD = {"benchmark": "train", "cases": [
    {"name": name, "verified": True, "ratio_step": 2.5,
     "plans": {who: {"step": {"median_ms": ms, "p10_ms": ms - 1, "p90_ms": ms + 2}}
               for who, ms in (("oper", 4.0), ("table_wise", 9.0))} | {"odd": None},
     "oper_phases_ms": {"forward": 1.0, "update": 2.0},
     "bytes_read": {"forward": {"own rank": 5e6, "memory domain": 7e6}}}
    for name in ("one", "two")]}


def test_records_show_steps_phases_and_links() -> None:
    page = bench_page(RECORD)
    check_page(page)
    for words in ("Contenders: training steps", "phase by phase", "Bytes by link", "table_wise",
                  "memory domain", "ratio step"):
        assert words in page
    assert page.count("<svg") == 4
    # Values of other types under these names are not shown.
    odd = {"benchmark": "x", "cases": [{"name": "a", "plans": 3, "oper_phases_ms": [1],
                                        "bytes_read": {"forward": 5}, "sent_bytes_by_host": ["b"],
                                        "contenders": {"torch": {"rate": 3.0}, "odd": None}}]}
    check_page(bench_page(odd))
    times = {"median_ms": None, "p10_ms": 1.0, "p90_ms": 2.0}
    many = [{"name": f"case {k} $", "rate": float("nan") if k == 0 else k,
             "plans": {"p": {"step": times}}} for k in range(50)]
    page = bench_page({"benchmark": "x", "cases": many})
    check_page(page)
    assert "The first 40 of 49" in page and page.count("<svg") == 1 and "case 3 $<" in page


@pytest.fixture(scope="module")
def drifting() -> list[AccessStats]:
    """Statistics of three days; each day, a fifth of the hot rows is replaced by other rows."""
    rng = np.random.default_rng(0)
    found = []
    rows = np.arange(4000)
    for _ in range(3):
        counts = np.zeros(4000, np.int64)
        counts[rows] = np.rint(1e6 / np.arange(1, 4001)).astype(np.int64)
        ids = np.flatnonzero(counts)
        table = TableStats.from_counts(4000, ids, counts[ids], (
            np.array([4]), np.array([int(counts.sum()) // 4])))
        found.append(AccessStats(100_000, {"<b>item": table}, "generated"))
        rows = rows.copy()
        hot = rng.choice(200, 40, replace=False)
        cold = rng.choice(np.arange(200, 4000), 40, replace=False)
        rows[hot], rows[cold] = rows[cold], rows[hot]
    return found


def test_drift_says_when_another_plan_pays(
        tmp_path: Path, drifting: list[AccessStats], capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"day{k}.npz" for k in range(3)]
    for path, stats in zip(paths, drifting, strict=True):
        stats.save(path)
    topology = topology_preset("h100-8", None)
    table = TableSpec("<b>item", 4000, 64, ("item",))
    plan = make_plan([table], drifting[0], topology, batch_size=2048, objective="inference")
    plan.save(tmp_path / "plan.json")
    words = ["report", "drift", *map(str, paths), "--html", str(tmp_path / "d.html")]
    assert main(words) == 0
    out, page = capsys.readouterr().out, (tmp_path / "d.html").read_text()
    check_page(page)
    want = distance(drifting[0].tables["<b>item"], drifting[2].tables["<b>item"])
    assert f"day2: mean distance {want:.3f}" in out and f"{want:.3f}" in page
    assert page.count("<svg") == 1 and "<b>" not in page
    assert main([*words, "--plan", str(tmp_path / "plan.json"), "--topology", "h100-8"]) == 0
    out, page = capsys.readouterr().out, (tmp_path / "d.html").read_text()
    check_page(page)
    assert page.count("<svg") == 2 and "When another plan pays" in page
    found = drifts(drifting[0], [("day2", drifting[2])], (plan, topology))[0]
    change = found.replanning
    assert change is not None and f"{change.old_step_us:,.1f}" in page
    saves = change.new_step_us < 0.9995 * change.old_step_us
    assert ("day2" in out) and ("pays after" in out.splitlines()[1]) == saves
    assert main([*words, "--plan", str(tmp_path / "plan.json")]) == 2  # on which machine?
    assert "--topology" in capsys.readouterr().err
    with pytest.raises(InvalidInputError, match="same tables"):
        drifts(drifting[0], [("other", AccessStats(1, {}))])


def ink(path: Path, width: int) -> tuple[float, float]:
    """Return a screenshot's mean brightness, and the share of pixels unlike the background."""
    from matplotlib import image

    pixels = image.imread(path)[..., :3]
    assert pixels.shape[1] == width
    ground = pixels[2, 2]
    return float(pixels.mean()), float((np.abs(pixels - ground).max(axis=2) > 0.1).mean())


def page_of(kind: str, stats: AccessStats, drifting: list[AccessStats]) -> str:
    if kind == "stats":
        return stats_page(stats)
    if kind == "bench":
        return bench_page(RECORD)
    topology = topology_preset("h100-8", None)
    item = TableSpec("<b>item", 4000, 64, ("item",))
    plan = make_plan([item], drifting[0], topology, batch_size=2048)
    if kind == "plan":
        return plan_page(plan, make_problem([item], drifting[0], topology, batch_size=2048))
    later = [("day 1", drifting[1]), ("day 2", drifting[2])]
    return drift_page(drifting[0], drifts(drifting[0], later, (plan, topology)), (plan, topology))


@pytest.mark.skipif(BROWSER is None, reason="needs a browser such as chromium")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
@pytest.mark.parametrize("kind", ["stats", "plan", "drift", "bench"])
def test_in_a_browser(tmp_path: Path, stats: AccessStats, drifting: list[AccessStats], kind: str,
                      width: int, dark: bool) -> None:
    page = tmp_path / "page.html"
    # The page reports its layout: the width of the content, the width of each plot and the right
    # edge of each legend entry, the height of the smallest text, and elements that are cut off and
    # cannot be scrolled to.
    probe = """<script>addEventListener('load', () => {
      const all = what => [...document.querySelectorAll(what)];
      const boxes = what => all(what).map(e => e.getBoundingClientRect());
      document.title = JSON.stringify([
        document.documentElement.scrollWidth, boxes('svg').map(b => b.width),
        boxes('.legend li').map(b => b.right), Math.min(...boxes('svg text').map(b => b.height)),
        all('body *').filter(e => /hidden|clip/.test(getComputedStyle(e).overflowX)
                                  && e.scrollWidth > e.clientWidth + 1).map(e => e.tagName)]);
      })</script></body>"""
    text = page_of(kind, stats, drifting)
    page.write_text(text.replace("</body>", probe))
    shot = tmp_path / "shot.png"
    common = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
              f"--window-size={width},3200", f"--user-data-dir={tmp_path / 'profile'}",
              *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
    def browse(*words: str) -> str:
        return subprocess.run([*common, *words, page.as_uri()], check=True, timeout=180,
                              capture_output=True, text=True).stdout

    dom = browse(f"--screenshot={shot}", "--dump-dom")
    if not shot.exists():  # the old headless mode does one thing at a time
        browse(f"--screenshot={shot}")
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found is not None
    scroll, plots, legends, text_height, cut = json.loads(html.unescape(found[1]))
    brightness, covered = ink(shot, width)
    assert scroll <= width + 1, "nothing sticks out to the side"
    assert cut == []
    assert len(plots) == text.count("<svg") > 0 and all(300 <= w <= width - 32 for w in plots)
    assert legends and max(legends) <= width - 16 and text_height >= 8, "to be read on a phone"
    assert covered > 0.01, "there is something to see"
    assert (brightness < 0.75) if dark else (brightness > 0.85)
