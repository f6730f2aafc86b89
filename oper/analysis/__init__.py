"""From lookups to access statistics: exact counts, presence, skew and drift.

Needs NumPy only; the modules load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "collect": "oper.analysis.collector",
    "Collector": "oper.analysis.collector",
    "tables_of": "oper.analysis.collector",
    "CountOptions": "oper.analysis.counting",
    "SparseCounter": "oper.analysis.counting",
    "TableCounter": "oper.analysis.counting",
    "PresenceSampler": "oper.analysis.presence",
    "Skew": "oper.analysis.summary",
    "skew": "oper.analysis.summary",
    "drift": "oper.analysis.summary",
    "describe": "oper.analysis.summary",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from oper.analysis.collector import (
        Collector as Collector,
        collect as collect,
        tables_of as tables_of,
    )
    from oper.analysis.counting import (
        CountOptions as CountOptions,
        SparseCounter as SparseCounter,
        TableCounter as TableCounter,
    )
    from oper.analysis.presence import PresenceSampler as PresenceSampler
    from oper.analysis.summary import (
        Skew as Skew,
        describe as describe,
        drift as drift,
        skew as skew,
    )


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'oper.analysis' has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
