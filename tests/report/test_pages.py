"""Pages of statistics, benchmarks and plans; what-if; simulation."""

import html
import itertools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oper import cli
from oper.analysis import Collector, CountOptions, distance
from oper.cli import main
from oper.data import SyntheticLog, write_synthetic_log
from oper.data.generate.generator import workload_from_dict
from oper.data.generate.lookups import count_workload
from oper.errors import FileFormatError, InvalidInputError, MissingDependencyError
from oper.plan import Plan, uniform_plan
from oper.report.bench_page import bench_page, load_record
from oper.report.drift_page import drift_page, drifts
from oper.report.plan_page import page as plan_page
from oper.report.run_page import load_metrics, run_page
from oper.report.simulation import folder_batches
from oper.report.stats_page import stats_page
from oper.search import evaluate, make_plan, make_problem
from oper.search.cost.evaluation import Phase
from oper.search.explain.what_if import changed_problem, parse_change
from oper.search.planner import plan_problem
from oper.search.problem.machine import make_machine
from oper.search.problem.presets import topology_preset
from oper.search.problem.statement import with_overlap
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Costs, Domain, Rack, Topology
from tests.search.search_cases import counted
from tests.support import check_page, read_trace, run_command

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


def test_drift_of_inexact_counts_is_marked() -> None:
    tables = [TableSpec(n, 50, 4, (n,)) for n in ("few", "many")]
    collector = Collector(tables, CountOptions(dense_budget_bytes=200, sparse_budget_bytes=0))
    for day in ("monday", "tuesday"):
        collector.add({n: np.arange(40) for n in ("few", "many")}, day)
    page = stats_page(collector.finish())
    check_page(page)
    assert "Only of the most frequent ids of a bucket, hence usually lower: many." in page


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
    # After a crash, the run resumed at the checkpoint of step 10.
    steps = [(5, "train"), (10, "train"), (10, "valid"), (15, "train"), (20, "train"),
             (10, "valid"), (15, "train"), (20, "train"), (20, "valid"), (25, "train")]
    path.write_text("".join(json.dumps({**line, "step": s, "event": e, "n": n}) + "\n"
                            for n, (s, e) in enumerate(steps)))
    assert [x["n"] for x in load_metrics(tmp_path)] == [0, 1, 5, 6, 7, 8, 9]
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
    bare = bench_page({"benchmark": "calibrate", "cases": [{"name": "2 processes", "rate": 5.0}]})
    assert "verified" not in bare  # such a benchmark compares no results
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
    rows, counts = np.arange(4000), np.rint(1e6 / np.arange(1, 4001)).astype(np.int64)
    for _ in range(3):
        table = TableStats.from_counts(4000, rows.copy(), counts, (
            np.array([4]), np.array([int(counts.sum()) // 4])))
        found.append(AccessStats(100_000, {"<b>item": table}, "generated"))
        hot = rng.choice(200, 40, replace=False)
        cold = rng.choice(np.arange(200, 4000), 40, replace=False)
        rows[hot], rows[cold] = rows[cold], rows[hot]
    return found


def test_the_drift_report_names_when_a_new_plan_pays_off(tmp_path: Path,
                                                         drifting: list[AccessStats],
                                                         capsys: pytest.CaptureFixture[str]
                                                         ) -> None:
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
    assert ("day2" in out) and ("pays off after" in out.splitlines()[1]) == saves
    assert main([*words, "--plan", str(tmp_path / "plan.json")]) == 2  # on which machine?
    assert "--topology" in capsys.readouterr().err
    with pytest.raises(InvalidInputError, match="same tables"):
        drifts(drifting[0], [("other", AccessStats(1, {}))])


def test_drift_is_modelled_for_the_plan_as_it_was_made(made: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """With its user features, replica groups and allowed placements, on the ranks of a group."""
    stats, path = str(made / "stats.npz"), tmp_path / "plan.json"
    assert main(["plan", stats, "--topology", "h100-8", "--dim", "16", "--allow", "owned,pull",
                 "--user-features", "C1,C2,C3", "--candidates", "32", "-o", str(path)]) == 0
    path.write_text(json.dumps(json.loads(path.read_text()) | {
        "replica_groups": 2, "topology": "h100-2x8"}))
    capsys.readouterr()
    assert main(["explain", str(path), "--stats", stats, "--json"]) == 0
    step_us = json.loads(capsys.readouterr().out)["step_us"]
    assert main(["report", "drift", stats, stats, "--plan", str(path), "--topology", "h100-2x8",
                 "--html", str(tmp_path / "d.html")]) == 0
    out = capsys.readouterr().out
    old_us, new_us = (float(x.replace(",", "")) for x in re.findall(r"([0-9.,]+) us with", out))
    assert old_us == pytest.approx(step_us, rel=0.01)
    assert new_us == pytest.approx(step_us, rel=0.02) and new_us <= old_us


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


# ---- plans ---------------------------------------------------------------------------------------

TOPOLOGY = """name = "mine"
[[domain]]
copies = 4
memory_bytes = "12MB"
read_gbps = 2000
cache_gbps = 4000
cache_bytes = "1MB"
link_gbps = 100
[costs]
phase_us = 2.0
"""
NUM_TABLES = 5


def topology(memory_bytes: int = 12_000_000) -> Topology:
    return Topology("mine", tuple(
        Domain((r,), 0, memory_bytes, 2000.0, 4000.0, 1_000_000, 100.0, 100.0)
        for r in range(4)), Costs(phase_us=2.0))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A plan, its statistics and its topology."""
    specs = [TableSpec("<b>&t0" if k == 0 else f"t{k}", 2000 * (k + 1), 64, (f"f{k}",))
             for k in range(NUM_TABLES)]
    rng = np.random.default_rng(0)
    AccessStats(200_000, {s.name: counted(s.num_rows, 1.0, rng) for s in specs}, "generated",
                True).save(tmp_path / "stats.npz")
    (tmp_path / "mine.toml").write_text(TOPOLOGY)
    plan = make_plan(specs, AccessStats.load(tmp_path / "stats.npz"), topology(), batch_size=1024)
    plan.save(tmp_path / "plan.json")
    return {"plan": str(tmp_path / "plan.json"), "stats": str(tmp_path / "stats.npz"),
            "topology": str(tmp_path / "mine.toml")}


def explain(files: dict[str, str], *words: str) -> int:
    return run_command("explain", files["plan"], "--stats", files["stats"], "--topology",
                       files["topology"], *words)


def test_page_is_complete_in_itself(files, tmp_path, capsys) -> None:
    target = tmp_path / "plan.html"
    assert explain(files, "--html", str(target)) == 0
    text = target.read_text()
    check_page(text)
    assert text.count("<svg") == 4 and not re.search("<b>|<iframe|<img|<object", text)
    plan, words = Plan.load(files["plan"]), html.unescape(text)
    for part in (f"{plan.lower_bound_us:,.1f} us", "imbalance", "forward", "rank", "update",
                 "share of lookups", "replicated", "<b>&t0", "Bytes by link",
                 "own memory", "out, within the host"):
        assert part in words, part
    for k in range(1, NUM_TABLES):
        assert re.search(rf"<text[^>]*>t{k}</text>", text)  # a label of the placement map
    assert f"{plan.lower_bound_us:.1f} us" in capsys.readouterr().out


def test_equal_plans_give_equal_pages(files, tmp_path) -> None:
    for name in ("a.html", "b.html"):
        explain(files, "--html", str(tmp_path / name))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_the_verb_loads_no_plotting_without_a_page(files) -> None:
    code = ("import sys; from oper.cli import main; "
            f"assert main(['explain', {files['plan']!r}, '--stats', {files['stats']!r}, "
            f"'--topology', {files['topology']!r}]) == 0; "
            "assert not {'matplotlib', 'jinja2'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_missing_package_is_named(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependencyError, match=r"jinja2.*oper\[report\]"):
        explain(files, "--html", str(tmp_path / "x.html"))
    assert not (tmp_path / "x.html").exists()


def test_what_if_compares_before_and_after(files, capsys) -> None:
    assert explain(files, "--what-if", "link=x0.25", "--what-if", "batch=2048", "--json") == 0
    found = json.loads(capsys.readouterr().out)["what_if"]
    before, after = found["before"], found["after"]
    assert found["changes"] == ["link=x0.25", "batch=2048"]
    assert (before["batch_size"], after["batch_size"]) == (1024, 2048)
    assert before["lower_bound_us"] <= before["planned_step_us"] <= before["step_us"] * (1 + 1e-9)
    assert after["step_us"] > before["step_us"]
    assert after["lower_bound_us"] > before["lower_bound_us"]
    assert explain(files, "--what-if", "link=x0.25") == 0
    out = capsys.readouterr().out
    assert "what if link=x0.25" in out and "before" in out
    line = next(x for x in out.splitlines() if x.startswith("  this plan  "))
    assert line.rstrip().endswith("%") and "+" in line


def test_what_if_reports_infeasibility(files, capsys) -> None:
    assert explain(files, "--what-if", "memory=-98%", "--json") == 0
    after = json.loads(capsys.readouterr().out)["what_if"]["after"]
    assert after["fits"] is False and after["planned_step_us"] is None
    assert explain(files, "--what-if", "memory=-98%") == 0
    assert "infeasible" in capsys.readouterr().out


def test_changes_scale_the_quantity_that_they_name() -> None:
    base = replace(topology(), source="measured")
    made, batch = changed_problem(base, 1000, [parse_change(x) for x in (
        "memory=+10%", "read=x2", "cross=-50%", "batch=+5%")])
    d = made.domains[3]
    assert d.memory_bytes == pytest.approx(1.1 * 12_000_000) and batch == 1050
    assert (d.read_gbps, d.cache_gbps, d.link_gbps, d.cross_gbps) == (4000.0, 8000.0, 100.0, 50.0)
    assert made.source == "assumed" and made.name == "mine memory=+10% read=x2 cross=-50%"
    assert changed_problem(base, 1000, [parse_change("batch=7")]) == (base, 7)
    with pytest.raises(InvalidInputError, match=r"'uplink=x2'.*that the topology states"):
        changed_problem(base, 1000, [parse_change("uplink=x2")])
    racks = replace(base, racks=(Rack(tuple(sorted({d.host for d in base.domains})), 10.0),))
    made, _ = changed_problem(racks, 1000, [parse_change("uplink=x2")])
    assert made.racks[0].uplink_gbps == 20.0 and made.domains == base.domains


@pytest.mark.parametrize("text", ["memory", "memory=10", "memory=+x%", "speed=+10%", "link=-100%",
                                  "batch=0", "read=x0", "memory=4096"])
def test_invalid_changes_are_named(text: str) -> None:
    with pytest.raises(InvalidInputError, match="what-if"):
        parse_change(text)


def test_page_shows_host_memory_and_copies_per_host(tmp_path) -> None:
    rng = np.random.default_rng(1)
    specs = [TableSpec(f"t{k}", 4000, 16, (f"f{k}",)) for k in range(3)]
    stats = AccessStats(200_000, {s.name: counted(4000, 1.1, rng) for s in specs}, "generated",
                        True)
    domains = tuple(Domain((r,), r // 2, 1_000_000, 2000.0, 4000.0, 1 << 20, 100.0, 10.0)
                    for r in range(4))
    machine = Topology("two hosts", domains, Costs(phase_us=2.0), host_memory_bytes=10**7,
                       host_gbps=20.0)
    held = {"tables": {"t0": {"pinned": [
        {"rows": [0, 500], "place": "replicated", "ranks": [1, 2]},
        {"rows": [2000, 4000], "place": "striped", "ranks": [0, 1, 2, 3], "memory": "host"}]}}}
    problem = make_problem(specs, stats, machine, batch_size=256, constraints=held)
    page = plan_page(plan_problem(problem), problem)
    assert "copy per host" in page and page.count("host memory") >= 3
    free = replace(problem, machine=make_machine(replace(machine, costs=Costs(phase_us=0.0))))
    hidden = with_overlap(free, dict.fromkeys(("forward", "backward", "update"), 1e9))
    plan = uniform_plan(specs, 4, batch_size=256)
    assert evaluate(plan, hidden).step_us == 0 and "0 % of the step" in plan_page(plan, hidden)


# ---- simulation ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A small preprocessed log, its statistics, and plans for two ranks and for two servers."""
    here = tmp_path_factory.mktemp("simulate")
    write_synthetic_log(here / "log.txt", SyntheticLog(num_rows=4000))
    assert cli.main(["preprocess", "criteo-kaggle", str(here / "log.txt"), "-o",
                     str(here / "data")]) == 0
    assert cli.main(["analyze", str(here / "data"), "-o", str(here / "stats.npz")]) == 0
    for name, machine in (("two", ["this-host"]), ("many", ["h100-2x8"])):
        assert cli.main(["plan", str(here / "stats.npz"), "--topology", *machine, "--dim", "16",
                         "--batch-size", "128", "-o", str(here / f"{name}.json")]) == 0
    return here


def simulated(capsys, *words: object) -> dict:
    capsys.readouterr()
    assert cli.main(["simulate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_user_features_are_drawn_once_per_request(made: Path, capsys: pytest.CaptureFixture[str]
                                                  ) -> None:
    plan, stats = made / "users.json", made / "stats.npz"
    value = json.loads((made / "two.json").read_text())
    value["notes"]["samples_per_bag"] = {f"C{k}": 32 for k in range(1, 20)}
    plan.write_text(json.dumps(value))
    found = simulated(capsys, plan, "--stats", stats, "--steps", "20")
    for phase in found["phases"]:
        assert phase["replayed_bytes"] == pytest.approx(phase["predicted_bytes"], rel=0.05)
    assert found["replayed_step_us"] == pytest.approx(found["predicted_step_us"], rel=0.1)
    assert cli.main(["simulate", str(plan), "--trace", str(made / "data")]) == 1
    assert "does not record which samples share" in capsys.readouterr().err


def test_declared_overlap_shortens_replayed_phases(made: Path, tmp_path: Path, capsys) -> None:
    """As in `oper explain`. The timeline has its own dense compute, and sorts all ids."""
    plan, stats, value = tmp_path / "p.json", made / "stats.npz", json.loads(
        (made / "two.json").read_text())
    value["notes"]["overlap_us"] = {"update": 20, "resolve": 20}
    plan.write_text(json.dumps(value))
    found, without = (simulated(capsys, x, "--stats", stats) for x in (plan, made / "two.json"))
    assert cli.main(["explain", str(plan), "--stats", str(stats), "--json"]) == 0
    step_us = json.loads(capsys.readouterr().out)["step_us"]
    assert found["predicted_step_us"] == pytest.approx(step_us)
    assert step_us < without["predicted_step_us"] - 20
    assert found["replayed_step_us"] == pytest.approx(step_us, rel=0.05)
    assert found["timeline_step_us"] == pytest.approx(without["timeline_step_us"])


def test_a_trace_of_real_batches(made: Path, capsys) -> None:
    trace = made / "trace.json"
    value = simulated(capsys, made / "two.json", "--trace", made / "data", "--steps", 5,
                      "--trace-out", trace, "--dense-us", 100, "--in-flight", 2)
    assert value["num_steps"] == 5 and value["world_size"] == 2
    # One row of 64 bytes is read for every id of 26 columns.
    assert sum(value["bytes_read"]["rows"].values()) == 5 * 2 * 128 * 26 * 64
    assert value["bytes_read_total"] == sum(map(sum, value["bytes_by_pair"]))
    # Statistics of the same log: the prediction is close.
    assert value["replayed_step_us"] == pytest.approx(value["predicted_step_us"], rel=0.05)
    assert value["timeline_step_us"] > 100
    events = read_trace(trace)["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} >= {
        "forward", "backward", "update", "dense", "ids ahead"}


def test_a_trace_of_bags(tmp_path: Path, capsys) -> None:
    """Every rank gets the bags of its samples, for columns with one id and with several ids."""
    lines = [f"{k % 2},{k % 7},{'|'.join(str(x) for x in range(k % 4))}" for k in range(400)]
    (tmp_path / "log.csv").write_text("\n".join(["label,one,many", *lines]) + "\n")
    log, data, stats, plan = (str(tmp_path / n) for n in ("log.csv", "data", "s.npz", "p.json"))
    assert cli.main(["preprocess", "csv", log, "-o", data, "--label", "label", "--sparse",
                     "one,many:|", "--min-count", "1"]) == 0
    assert cli.main(["analyze", data, "-o", stats]) == 0
    assert cli.main(["plan", stats, "--topology", "this-host", "--dim", "16", "-o", plan]) == 0
    tables = [TableSpec(n, t.num_rows, 16, (n,)) for n, t in AccessStats.load(stats).tables.items()]
    (first, *_), (whole, *_) = (list(folder_batches(data, "train", tables, size, ranks))
                                for size, ranks in ((20, 2), (40, 1)))
    for name in ("one", "many"):
        for field in ("ids", "lengths"):
            parts = [getattr(rank[name], field) for rank in first]
            assert np.array_equal(np.concatenate(parts), getattr(whole[0][name], field))
    assert whole[0]["many"].lengths.tolist() == [k % 4 for k in range(40)]
    value = simulated(capsys, plan, "--trace", data, "--batch-size", 20, "--steps", 3)
    assert sum(value["bytes_read"]["rows"].values()) == 120 * (1 + 1.5) * 64


def test_batches_drawn_from_statistics(made: Path, capsys) -> None:
    words = (made / "many.json", "--stats", made / "stats.npz", "--steps", 3)
    value = simulated(capsys, *words, "--seed", 5)
    assert value["world_size"] == 16 and value["bytes_read"]["rows"]["cross host"] > 0
    assert value["replayed_step_us"] == pytest.approx(value["predicted_step_us"], rel=0.15)
    # Distinct rows are sent between servers, with half the bits if requested. The GPUs of a server
    # read each other's memory.
    sent = value["bytes_sent"]
    assert all([*by] == ["cross host"] for by in sent.values())
    assert 0 < sent["rows"]["cross host"] < value["bytes_read"]["rows"]["cross host"]
    half = simulated(capsys, *words, "--seed", 5, "--message-bits", "16,32", "--clipped", "*")
    half = half["bytes_sent"]
    assert half["rows"]["cross host"] * 2 == sent["rows"]["cross host"]
    assert half["row_ids"] == sent["row_ids"] and "squares" not in half  # no column pieces
    assert half["gradient_rows"] == sent["gradient_rows"]
    assert cli.main(["simulate", *map(str, words), "--clipped", "nobody"]) == 2
    assert value == simulated(capsys, *words, "--seed", 5)
    assert value != simulated(capsys, *words, "--seed", 6)
    capsys.readouterr()
    assert cli.main(["simulate", *map(str, words)]) == 0
    out = capsys.readouterr().out
    assert "timeline" in out and "cross host" in out and "forward" in out


def test_phases_name_the_limits_of_all_steps(made: Path, monkeypatch, capsys) -> None:
    limits = itertools.cycle(["local", "link_in", "link_in"])
    monkeypatch.setattr(Phase, "binding", property(lambda _: next(limits)))
    value = simulated(capsys, made / "two.json", "--stats", made / "stats.npz", "--steps", 3)
    assert {p["binding"] for p in value["phases"]} == {"link_in, local"}


def test_replay_errors_name_the_cause(made: Path, tmp_path: Path, capsys) -> None:
    plan = str(made / "two.json")
    other = (made / "two.json").read_text().replace('"features": ["C1"]', '"features": ["other"]')
    (tmp_path / "other.json").write_text(other)
    assert cli.main(["simulate", plan]) == 2
    assert "--trace DIR or --stats FILE" in capsys.readouterr().err
    for words, text in (
            ([plan, "--trace", str(made / "data"), "--batch-size", "100000"], "full batches"),
            ([plan, "--trace", str(tmp_path)], "preprocessed folder"),
            ([plan, "--stats", str(tmp_path / "none"), "--trace-out", str(tmp_path)],
             "a file, not a folder"),
            ([plan, "--stats", str(made / "stats.npz"), "--topology", "h100-8"], "world_size=2"),
            ([str(tmp_path / "other.json"), "--trace", str(made / "data")], "missing features")):
        capsys.readouterr()
        assert cli.main(["simulate", *words]) == 1, words
        assert text in capsys.readouterr().err


def test_predictions_need_the_hotness_order_of_the_plan(made: Path, tmp_path: Path, capsys) -> None:
    plan, hottest = Plan.load(made / "two.json"), AccessStats.load(made / "stats.npz").tables["C3"]
    words = ["simulate", str(tmp_path / "p.json"), "--stats", str(made / "stats.npz")]
    for order, status in ((hottest.head_ids[:8], 0), (hottest.head_ids[7::-1], 1)):
        replace(plan, tables=tuple(replace(t, head_ids=order) if t.table.name == "C3" else t
                                   for t in plan.tables)).save(tmp_path / "p.json")
        assert cli.main(words) == status
    assert "another hotness order in the statistics=['C3']" in capsys.readouterr().err
