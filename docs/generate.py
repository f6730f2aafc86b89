"""Hooks of MkDocs that add pages to the site: references generated from the code, and copies of
pages outside ``docs/``.

Each function in `GENERATED` returns the Markdown of one page. Links between pages are written as
paths in the repository, so that they work there as well; `rewritten` turns them into paths of the
site.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import posixpath
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Pages outside of docs/ that the site shows: path in the repository -> path in the site.
COPIED = {
    "benchmarks/README.md": "project/benchmarks.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
API: dict[str, tuple[str, ...]] = {
    "Shard and train": ("oper.shard", "oper.DynamicTable", "oper.dynamic_rows",
                        "oper.KeyedRows", "oper.KeyMap", "oper.no_sync", "oper.synchronize",
                        "oper.micro_batches", "oper.MicroBatchPipeline", "oper.trace",
                        "oper.tracing.Trace", "oper.migrate",
                        "oper.replan", "oper.row_stats", "oper.replanning.Replanning",
                        "oper.Replanner",
                        "oper.replanning.WatchOptions", "oper.replanning.Event"),
    "Statistics and plans": (
        "oper.collect", "oper.AccessStats", "oper.TableStats", "oper.make_plan", "oper.verify_plan",
        "oper.Plan", "oper.Topology", "oper.TableSpec", "oper.search.Constraints"),
    "Optimizers of the tables": (
        "oper.SGD", "oper.LarsSGD", "oper.RowWiseAdagrad", "oper.Adagrad", "oper.Adam",
        "oper.AdamW", "oper.PartialRowWiseAdam", "oper.LAMB", "oper.PartialRowWiseLAMB"),
    "Checkpoints": (
        "oper.save_checkpoint", "oper.load_checkpoint", "oper.DeltaCheckpoints", "oper.SavePlanner",
        "oper.LoadPlanner", "oper.CheckpointReader", "oper.rows_on_demand"),
    "Data": ("oper.data.Loader", "oper.data.LoaderOptions"),
    "Serving": (
        "oper.publish", "oper.attach", "oper.Publication", "oper.ServedModel", "oper.serve.Client",
        "oper.serve.Server", "oper.serve.ServeOptions", "oper.serve.PublishedModel",
        "oper.serve.Signature", "oper.serve.TieredRows"),
    "TorchRec": (
        "oper.integration.torchrec_plans.OperPlanner",
        "oper.integration.torchrec_plans.ExportOptions",
        "oper.integration.torchrec_plans.to_torchrec",
        "oper.integration.torchrec_plans.from_torchrec",
        "oper.integration.torchrec_plans.lost_in_torchrec"),
    "Errors": (
        "oper.OperError", "oper.InvalidInputError", "oper.FileFormatError", "oper.PlanError",
        "oper.PlanInfeasibleError", "oper.MissingDependencyError", "oper.PeerLostError",
        "oper.DeadlineError", "oper.DesyncError"),
}


def api() -> str:
    """The page of the public Python interface, whose entries mkdocstrings fills in. Raises
    RuntimeError if a name of `oper.__all__` is not in `API`."""
    import oper

    listed = [name for names in API.values() for name in names]
    missing = {f"oper.{name}" for name in oper.__all__} - set(listed)
    if missing:
        raise RuntimeError(f"public names that docs/generate.py does not list: {sorted(missing)}")
    lines = ["# Python API", "", "What `import oper` offers, and the classes of its packages that "
             "programs use. Everything else may change without notice."]
    for title, names in API.items():
        lines += ["", f"## {title}"]
        for path in names:
            module, _, name = path.rpartition(".")
            found = getattr(importlib.import_module(module), name)
            lines += ["", f"::: {found.__module__}.{found.__qualname__}",
                      "    options:", f"      heading: {path}"]
    return "\n".join(lines) + "\n"


def cli() -> str:
    """The page of all commands with their arguments, from their parsers."""
    from oper.cli import COMMANDS, build_parser

    lines = ["# Command line", "",
             "Results go to stdout, everything else to stderr. Exit codes: 0 ok, 1 failure, "
             "2 usage, 3 no plan fits the machine, 130 interrupted.", ""]
    for verb, (_, about) in COMMANDS.items():
        lines.append(f"- [`oper {verb}`](#oper-{verb}): {about}")
    for verb in COMMANDS:
        lines += _command(_children(build_parser(verb))[verb], 2)
    return "\n".join(lines) + "\n"


def _children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {name: child for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
            for name, child in action.choices.items()}


def _command(parser: argparse.ArgumentParser, level: int) -> list[str]:
    """One command's section, and those of its own commands below it."""
    if hasattr(parser, "complete"):  # of a benchmark, which adds its own arguments late
        parser.complete()
    lines = ["", f"{'#' * level} {parser.prog}", ""]
    if parser.description:
        lines += [f"{parser.description}.", ""]
    rows = []
    for group in parser._action_groups:
        found = [(_spelled(a), _help(parser, a)) for a in group._group_actions
                 if not isinstance(a, argparse._HelpAction | argparse._SubParsersAction)]
        if found and group.title not in ("positional arguments", "options"):
            rows.append((f"**{group.title}**", ""))
        rows += found
    lines += ["| argument | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)] if rows else []
    if parser.epilog:
        lines += ["", parser.epilog % {"prog": parser.prog}]
    for child in _children(parser).values():
        lines += _command(child, level + 1)
    return lines


def _spelled(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        names = action.metavar or (", ".join(map(str, action.choices)) if action.choices else
                                   action.dest.upper() if action.option_strings else action.dest)
        value = " ".join(names) if isinstance(names, tuple) else str(names)
        value += "..." if action.nargs in ("+", "*") else ""
    spelled = [f"`{flag} {value}`".replace(" `", "`") for flag in action.option_strings]
    return _cell(", ".join(spelled) or f"`{value}`")


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = (action.help or "") % {"prog": parser.prog, **vars(action)}
    return _cell(text + (" (required)" if action.required and action.option_strings else ""))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def environment() -> str:
    """The page of the environment variables that OPER reads."""
    from oper.support.environment import BUILD, VARIABLES

    lines = ["# Environment variables", "",
             "An empty variable counts as unset. An invalid value raises an error before any work "
             "begins; `oper doctor` shows the values."]
    for title, at in (("At run time", False), ("When OPER is built", True)):
        lines += ["", f"## {title}", "", "| variable | meaning | values |", "|---|---|---|"]
        lines += [f"| `{name}` | {_cell(v.about)} | {_cell(v.expected) or 'any'} |"
                  for name, v in VARIABLES.items() if (v.at == BUILD) == at]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    """The page of the keys of a training configuration, from its dataclasses."""
    from oper.rl_rec.registry import WORKLOADS
    from oper.train.config import DLRMConfig, TrainConfig

    lines = ["# Training configuration", "",
             "The keys of `oper train CONFIG`, a TOML file; `--set KEY=VALUE` takes the same keys, "
             "and lists separated by commas (`--set model.dense_layers=128,64`). "
             "The file overrides the defaults, and the command line the file. Paths in a file are "
             "relative to its folder. `examples/train.toml` is a commented example."]
    lines += _keys(TrainConfig, "")
    for name, kind in {"dlrm": DLRMConfig, **{n: w.config for n, w in WORKLOADS.items()}}.items():
        lines += ["", f'## `[model]` with `name = "{name}"`', "", *_table(kind, "")]
    return "\n".join(lines) + "\n"


def _keys(kind: type, prefix: str) -> list[str]:
    hints = typing.get_type_hints(kind)
    title = f"## `[{prefix.rstrip('.')}]`" if prefix else "## Top level"
    lines = ["", title, "", *_table(kind, prefix)]
    for part in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[part.name]):
            lines += _keys(hints[part.name], f"{part.name}.")
    return lines


def _table(kind: type, prefix: str) -> list[str]:
    hints = typing.get_type_hints(kind)
    about = _attributes(kind)
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for part in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[part.name]) or part.name in ("model", "model_name"):
            continue
        default = part.default
        if default is dataclasses.MISSING:
            default = "" if part.default_factory is dataclasses.MISSING else part.default_factory()
        shown = _cell(json.dumps(default))  # TOML writes these values as JSON does
        lines.append(f"| `{part.name}` | `{shown}` | {about.get(part.name, '')} |")
    return lines if len(lines) > 2 else ["No keys."]


def _attributes(kind: type) -> dict[str, str]:
    """The section "Attributes:" of the docstrings of a class and its bases, by name."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[1:-1]):
        found |= _attributes(base)
    _, _, section = (kind.__doc__ or "").partition("Attributes:")
    for entry in re.split(r"\n {8}(?=\w)", section.split("\n\n")[0]):
        names, colon, text = entry.strip().partition(":")
        if colon:
            found |= {name.strip(): _cell(_code(text)) for name in names.split(",")}
    return found


def _code(text: str) -> str:
    return re.sub(r"(?<!`)`([^`\n]+)`(?!`)|``([^`]+)``",
                  lambda m: f"`{m.group(1) or m.group(2)}`", text)


def metrics() -> str:
    """The page of the metrics in a server's ``/metrics``."""
    from oper.serve.metrics import SUPERVISOR, WORKERS

    lines = ["# Server metrics", "",
             "`GET /metrics` of `oper serve` answers in Prometheus' format, for all workers "
             "together. Percentiles are computed by Prometheus: "
             "`histogram_quantile(0.99, rate(oper_request_seconds_bucket[1m]))`. Gauges are "
             "refreshed twice a second.", "", "| metric | kind | label | meaning |",
             "|---|---|---|---|"]
    for metric in (*WORKERS, *(metric for metric, _, _ in SUPERVISOR)):
        label = f"{metric.label}: {', '.join(metric.values)}".strip(": ")
        lines.append(f"| `{metric.family}` | {metric.kind} | {label} | {_cell(metric.about)} |")
    return "\n".join(lines) + "\n"


GENERATED: dict[str, Callable[[], str]] = {
    "reference/api.md": api,
    "reference/cli.md": cli,
    "reference/environment.md": environment,
    "reference/configuration.md": configuration,
    "reference/metrics.md": metrics,
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def rewritten(text: str, source: str, page: str) -> str:
    """`text` with the links of a page of the repository turned into those of the site.

    Args:
        text: Markdown.
        source: the page's path in the repository.
        page: its path in the site.
    """
    def link(match: re.Match[str]) -> str:
        words, path = match.group(1), match.group(2)
        anchor = re.sub("-+", "-", match.group(3) or "")  # GitHub's anchors keep every dash
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in COPIED:
            target = COPIED[target]
        elif target == "README.md":
            target = "index.md"
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:  # a file that the site does not show
            return f"{words} (`{target}`)" if words.strip("`") != target else words
        return f"[{words}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{anchor})"

    return _LINK.sub(link, text)


def pages() -> Iterator[tuple[str, str]]:
    """Path in the site and Markdown of every page that is made or copied."""
    for path, make in GENERATED.items():
        yield path, make()
    for source, path in COPIED.items():
        yield path, rewritten((ROOT / source).read_text(encoding="utf-8"), source, path)


def on_files(files: Any, config: Any) -> Any:
    """Hook: adds the pages."""
    from mkdocs.structure.files import File

    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Hook: links of the pages in ``docs/``."""
    path = page.file.src_uri
    if path in GENERATED or path in COPIED.values():
        return markdown
    return rewritten(markdown, f"docs/{path}", path)


if __name__ == "__main__":  # writes the pages below a folder
    for path, text in pages():
        place = Path(sys.argv[1]) / path
        os.makedirs(place.parent, exist_ok=True)
        place.write_text(text, encoding="utf-8")
