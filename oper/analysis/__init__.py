"""From lookups to access statistics: exact counts, presence, skew and drift.

Needs NumPy only; the modules load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.support.lazy import lazy_exports

_PUBLIC = {
    "collect": "oper.analysis.collector",
    "Collector": "oper.analysis.collector",
    "tables_of": "oper.analysis.collector",
    "CountOptions": "oper.analysis.counting",
    "SparseCounter": "oper.analysis.counting",
    "KeyCounter": "oper.analysis.key_counting",
    "KeyForecast": "oper.analysis.capacity",
    "forecast": "oper.analysis.capacity",
    "TableCounter": "oper.analysis.counting",
    "HeavyHitters": "oper.analysis.sketch",
    "DistinctSample": "oper.analysis.sketch",
    "merge_stats": "oper.analysis.sketch",
    "renumber_stats": "oper.analysis.sketch",
    "PresenceSampler": "oper.analysis.presence",
    "ValueCountOptions": "oper.analysis.value_counts",
    "stats_from_value_counts": "oper.analysis.value_counts",
    "Skew": "oper.analysis.summary",
    "skew": "oper.analysis.summary",
    "drift": "oper.analysis.summary",
    "distance": "oper.analysis.summary",
    "describe": "oper.analysis.summary",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from oper.analysis.capacity import KeyForecast as KeyForecast, forecast as forecast
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
    from oper.analysis.key_counting import KeyCounter as KeyCounter
    from oper.analysis.presence import PresenceSampler as PresenceSampler
    from oper.analysis.sketch import (
        DistinctSample as DistinctSample,
        HeavyHitters as HeavyHitters,
        merge_stats as merge_stats,
        renumber_stats as renumber_stats,
    )
    from oper.analysis.summary import (
        Skew as Skew,
        describe as describe,
        distance as distance,
        drift as drift,
        skew as skew,
    )
    from oper.analysis.value_counts import (
        ValueCountOptions as ValueCountOptions,
        stats_from_value_counts as stats_from_value_counts,
    )

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
