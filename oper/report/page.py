"""A self-contained HTML page of figures, plots and tables, for light and dark mode and any width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oper.errors import needs

# Plots take the page's colours for text and axes. Labels inside coloured bars, whose ids begin with
# "inside", stay dark in both modes.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --text: #1d2126; --soft: #5c6570; --line: #d6dade; --back: #fff; --panel: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ec; --soft: #9ba5af; --line: #3a424a; --back: #15181b; --panel: #1e2327; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
       max-width: 72rem; margin: 1.5rem auto 4rem; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.6rem, 1fr)); gap: 0.6rem; }
dl div { border: 1px solid var(--line); border-radius: 6px; padding: 0.5rem 0.7rem; }
dt { color: var(--soft); font-size: 0.8rem; } dd { margin: 0; font-size: 1.2rem; }
figure { margin: 0.5rem 0; } figcaption, .note { color: var(--soft); font-size: 0.9rem; }
.wide { overflow-x: auto; }
.wide svg { display: block; width: 100%; height: auto; max-width: 42rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0.3rem 0; padding: 0;
          list-style: none; font-size: 0.85rem; }
.legend i { display: inline-block; width: 1.4rem; margin-right: 0.4rem; vertical-align: middle;
            border-width: 0.2rem 0 0; }
svg text { fill: var(--text) !important; }
svg [id^="inside"] text { fill: #111 !important; }
svg [style*="stroke: #000000"] { stroke: var(--soft) !important; }
svg [style*="fill: #000000"] { fill: var(--text) !important; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.3rem 1.2rem 0.3rem 0; border-bottom: 1px solid var(--line);
         white-space: nowrap; vertical-align: top; }
th { color: var(--soft); font-weight: normal; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
@media (max-width: 30rem) {
  th, td { padding-right: 0.7rem; } th, td:not(.number) { white-space: normal; }
}
pre { overflow-x: auto; background: var(--panel); padding: 1rem; border-radius: 6px;
      font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="note">{{ about }}</p>
<dl>
{% for name, value in tiles %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}</dl>
{% for block in blocks %}<h2>{{ block.heading }}</h2>
{% if block.svg is defined %}<figure><div class="wide">{{ block.svg|safe }}</div>\
<figcaption>{{ block.caption }}</figcaption></figure>
{% elif block.head is defined %}{% if block.note %}<p class="note">{{ block.note }}</p>
{% endif %}{% set numbers = block.numbers() %}<div class="wide"><table><thead><tr>\
{% for x in block.head %}<th{% if numbers[loop.index0] %} class="number"{% endif %}>{{ x }}</th>\
{% endfor %}</tr></thead>
<tbody>{% for row in block.rows %}<tr>{% for x in row %}\
<td{% if numbers[loop.index0] %} class="number"{% endif %}>{{ x }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% if block.after %}<p class="note">{{ block.after }}</p>
{% endif %}{% else %}<pre>{{ block.text }}</pre>
{% endif %}{% endfor %}</body>
</html>
"""
_NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(\.[0-9]+)?(e[-+]?[0-9]+)?( ?(%|[KMGTP]?i?B|us|ms|s))?|-|")


@dataclass(frozen=True, slots=True)
class Plot:
    """An SVG element with a heading and a caption."""

    heading: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a heading, and optional notes before and after it."""

    heading: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    after: str = ""

    def numbers(self) -> list[bool]:
        """Return whether each column contains only numbers and is therefore right-aligned."""
        return [all(_NUMBER.fullmatch(str(row[k])) for row in self.rows)
                for k in range(len(self.head))]


@dataclass(frozen=True, slots=True)
class Text:
    """Preformatted text with a heading."""

    heading: str
    text: str


def render(title: str, about: str, tiles: Sequence[tuple[str, str]],
           blocks: Sequence[Plot | Table | Text]) -> str:
    """Render the page to HTML; names and values are escaped, plots (SVG) are not.

    Raises:
        MissingDependencyError: jinja2 is not installed.
    """
    with needs("cannot write a page", "oper[report]"):
        import jinja2
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    text: str = template.render(title=title, about=about, tiles=tiles, blocks=blocks)
    return text
