"""One HTML page that is complete in itself: figures, plots, tables; light and dark, any width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oper.errors import MissingDependencyError, fail

# Plots keep a light ground of their own, so that their colours stay what they are in the dark.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --text: #222; --ground: #fff; --faint: #666; --line: #ddd; --plot: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --ground: #16181c; --faint: #a0a4ab; --line: #3a3d44; --plot: #f4f4f2; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground);
       max-width: 72rem; margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 0.8rem; }
dl div { border: 1px solid var(--line); border-radius: 6px; padding: 0.5rem 0.8rem; }
dt, .note, figcaption { color: var(--faint); font-size: 0.85rem; }
dd { margin: 0; font-size: 1.25rem; }
figure { margin: 0.5rem 0; } figure .plot { background: var(--plot); border-radius: 6px;
  padding: 0.5rem; overflow-x: auto; }
svg { width: 100%; min-width: 30rem; max-width: 56rem; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; } th, td { text-align: right;
  padding: 0.2rem 0.7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="note">{{ about }}</p>
<dl>
{% for name, value in tiles %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{% endfor %}</dl>
{% for heading, caption, svg in plots %}<h2>{{ heading }}</h2>
<figure><div class="plot">{{ svg|safe }}</div><figcaption>{{ caption }}</figcaption></figure>
{% endfor %}{% for heading, head, rows in tables %}<h2>{{ heading }}</h2>
<div class="wide"><table><thead><tr>{% for x in head %}<th>{{ x }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rows %}<tr>{% for x in row %}<td>{{ x }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% endfor %}</body>
</html>
"""


def render(title: str, about: str, tiles: Sequence[tuple[str, str]],
           plots: Sequence[tuple[str, str, str]],
           tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[Any]]]]) -> str:
    """The page as text; names and values are escaped, plots (SVG) are not.

    Raises:
        MissingDependencyError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise MissingDependencyError(fail("cannot write a page", "jinja2", None, "installed",
                                          "pip install 'oper[report]'")) from None
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    text: str = template.render(title=title, about=about, tiles=tiles, plots=plots, tables=tables)
    return text
