"""Access statistics from lookups: exact counts, presence, skew and drift. Needs only NumPy."""

from oper.analysis.collector import Collector, collect, tables_of
from oper.analysis.counting import CountOptions, KeyCounter, TableCounter
from oper.analysis.presence import PresenceSampler
from oper.analysis.sketch import DistinctSample, HeavyHitters, merge_stats, renumber_stats
from oper.analysis.summary import Skew, describe, distance, drift, skew
from oper.analysis.value_counts import ValueCountOptions, stats_from_value_counts
from oper.rows.capacity import KeyForecast, forecast

__all__ = [
    "Collector", "CountOptions", "DistinctSample", "HeavyHitters", "KeyCounter", "KeyForecast",
    "PresenceSampler", "Skew", "TableCounter", "ValueCountOptions", "collect", "describe",
    "distance", "drift", "forecast", "merge_stats", "renumber_stats", "skew",
    "stats_from_value_counts", "tables_of",
]
