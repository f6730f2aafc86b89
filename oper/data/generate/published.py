"""Published facts about real workloads, and synthetic tables that are calibrated on them.

Criteo Kaggle (Display Advertising Challenge): distinct values of C1..C26. Criteo 1TB: the same over
the 24 days, of all values and of those seen at least three times (dlrm, torchrec_dlrm). MLPerf
DLRM-v2: rows (capped at 40,000,000) and ids per bag of the multi-hot data. DeepRecSys (Gupta et al.
2020): RM1 to RM3. Meta's embedding_bag traces of 2021: how often the rows of one batch of 65,536
samples occur (dlrm_datasets, MIT).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oper.data.generate.popularity import Popularity, fit_cardinality, fit_locality, power_law

CRITEO_KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)
CRITEO_1TB_ROWS = 4_373_472_329
CRITEO_1TB_DISTINCT = (
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10, 2209,
    11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36)
CRITEO_1TB_FREQUENT = (
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209,
    11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35)
MLPERF_MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1,
                    1)
MLPERF_CAP = 40_000_000
META_2021 = {  # the trace fbgemm_t856_bs65536: 856 tables pooled
    "indices": 887_017_990, "rows": 128_435_723, "pooling_factor": 15.812,
    "row_shares": (0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001, 0, 0, 0,
                   0, 0, 0, 0),
    "access_shares": (0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.05, 0.049,
                      0.048, 0.048, 0.043, 0.031, 0.023, 0.019),
}


@dataclass(frozen=True, slots=True, eq=False)
class PublishedTable:
    """A table by published facts.

    Attributes:
        name: its name.
        popularity: of its rows.
        length: ids per bag.
        fixed_bags: see `oper.data.generate.generator.TableModel`.
    """

    name: str
    popularity: Popularity
    length: int = 1
    fixed_bags: bool = False


def criteo_1tb() -> list[PublishedTable]:
    """26 columns of the 24-day log: power laws with its numbers of distinct and frequent values."""
    return [PublishedTable(f"C{k + 1}", fit_cardinality(CRITEO_1TB_ROWS, distinct, frequent, 3))
            for k, (distinct, frequent) in enumerate(
                zip(CRITEO_1TB_DISTINCT, CRITEO_1TB_FREQUENT, strict=True))]


def mlperf_dlrm_v2() -> list[PublishedTable]:
    """The same columns capped and multi-hot: first ids as above, the others drawn evenly."""
    tables = []
    for table, length in zip(criteo_1tb(), MLPERF_MULTI_HOT, strict=True):
        k = int(table.name[1:]) - 1
        rows = min(MLPERF_CAP, CRITEO_1TB_DISTINCT[k])
        tables.append(PublishedTable(table.name, _capped(table.popularity, rows), length, True))
    return tables


def _capped(popularity: Popularity, num_rows: int) -> Popularity:
    """The hottest `num_rows` rows; colder values fold onto all of them evenly (id modulo rows)."""
    ends = np.cumsum(popularity.rows)
    if ends[-1] <= num_rows:
        return popularity
    rows = np.clip(num_rows - (ends - popularity.rows), 0, popularity.rows)
    weight = popularity.mass / popularity.rows
    folded = 1.0 - float(rows @ weight)
    return Popularity.of(rows[rows > 0], weight[rows > 0] + folded / num_rows)


def meta_2021(scale: float = 1 / 856) -> list[PublishedTable]:
    """One table (of 856, or `scale` of all rows) whose batches repeat rows as Meta's traces did.

    A batch of 65,536 samples touches its rows as often as the published histogram says.
    """
    rows = np.array(META_2021["row_shares"])
    accesses = np.array(META_2021["access_shares"])
    touched = META_2021["rows"]
    indices = META_2021["indices"]
    assert isinstance(touched, int) and isinstance(indices, int)
    popularity, _ = fit_locality(rows, accesses, indices / touched, round(touched * scale))
    return [PublishedTable("pooled", popularity, 16)]


def deeprecsys(tables: int, rows: int, length: int) -> Callable[[], list[PublishedTable]]:
    """Tables alike, with a power law of exponent 1.05 (their popularity is not published)."""
    return lambda: [PublishedTable(f"t{k}", power_law(rows, 1.05), length) for k in range(tables)]


PRESETS: dict[str, Callable[[], list[PublishedTable]]] = {
    "criteo-1tb": criteo_1tb, "mlperf-dlrm-v2": mlperf_dlrm_v2, "meta-2021": meta_2021,
    "deeprecsys-rm1": deeprecsys(8, 4_000_000, 80), "deeprecsys-rm2": deeprecsys(32, 500_000, 120),
    "deeprecsys-rm3": deeprecsys(10, 2_000_000, 20),
}
