"""Tables, statistics and machines of the planning benchmark, drawn from seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oper.analysis import ValueCountOptions, stats_from_value_counts
from oper.bench.core.workload import data_files
from oper.data.generate.published import (
    CRITEO_1TB_DISTINCT,
    CRITEO_KAGGLE_ROWS,
    MLPERF_CAP,
    MLPERF_MULTI_HOT,
)
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
from oper.topology import Costs, Domain, Topology

NUM_SAMPLES = 100_000_000  # number of samples that synthetic statistics represent
_HEAD = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """Tables, access statistics, and samples per rank and step."""

    tables: list[TableSpec]
    stats: AccessStats
    batch_size: int


def power_law(num_rows: int, exponent: float, length: float) -> TableStats:
    """Access statistics of a bounded power law. Rows after the first 64 are in groups of
    geometrically growing size, and each has the count of its group's middle rank. Bags have
    floor(`length`) or floor(`length`) + 1 ids, and `length` on average."""
    edges = np.unique(np.concatenate([np.arange(min(num_rows, _HEAD) + 1), np.geomspace(
        _HEAD, max(num_rows, _HEAD + 1), 400).astype(np.int64)]))
    edges = np.append(edges[edges < num_rows], num_rows)
    rows = np.diff(edges)
    weight = ((edges[:-1] + edges[1:] + 1) / 2.0) ** -exponent
    counts = np.rint(weight / (weight @ rows) * NUM_SAMPLES * length).astype(np.int64)
    head = int(min(_HEAD, (counts[:_HEAD] > 0).sum(), num_rows))
    values, inverse = np.unique(counts[head:], return_inverse=True)
    tail = np.bincount(inverse, rows[head:], minlength=values.size).astype(np.int64)
    short = int(np.floor(length))
    many = round((length - short) * NUM_SAMPLES)
    lengths = np.array([short, short + 1]) if many else np.array([short])
    bags = np.array([NUM_SAMPLES - many, many]) if many else np.array([NUM_SAMPLES])
    return TableStats(num_rows, np.arange(head), counts[:head], values, tail, lengths, bags)


def _workload(rows: Sequence[int], dims: Sequence[int], lengths: Sequence[float],
              exponents: Sequence[float], batch_size: int) -> Workload:
    specs = [TableSpec(f"t{k}", int(n), int(d), (f"f{k}",))
             for k, (n, d) in enumerate(zip(rows, dims, strict=True))]
    stats = {s.name: power_law(s.num_rows, float(a), float(x))
             for s, a, x in zip(specs, exponents, lengths, strict=True)}
    return Workload(specs, AccessStats(NUM_SAMPLES, stats, "synthetic power laws", True),
                    batch_size)


def criteo_kaggle(seed: int) -> Workload:
    """Criteo Kaggle's 26 tables with their published numbers of rows, one id per bag."""
    rng = np.random.default_rng(seed)
    n = len(CRITEO_KAGGLE_ROWS)
    return _workload(CRITEO_KAGGLE_ROWS, [128] * n, [1.0] * n, rng.uniform(1.0, 1.2, n).tolist(),
                     8192)


def mlperf_dlrm_v2(seed: int) -> Workload:
    """The 26 tables and multi-hot bag lengths of MLPerf DLRM-DCNv2."""
    rng = np.random.default_rng(seed)
    rows = [min(n, MLPERF_CAP) for n in CRITEO_1TB_DISTINCT]
    return _workload(rows, [128] * len(rows), MLPERF_MULTI_HOT,
                     rng.uniform(0.9, 1.2, len(rows)).tolist(), 8192)


def avazu(seed: int) -> Workload | None:
    """Avazu from its published counts of values (those with 50 or more); None without the file."""
    found = data_files("avazu_value_counts/avazu_train_value_counts_ge50.csv.gz")
    if not found:
        return None
    stats = stats_from_value_counts(found[0], ValueCountOptions(min_count=50))
    return Workload([TableSpec(name, t.num_rows, 64, (name,))
                     for name, t in sorted(stats.tables.items())], stats, 8192)


def synthetic(num_tables: int, seed: int, exponent: float | None = None) -> Workload:
    """Random tables: 10^2 to 10^7.3 rows, dims 16 to 256, bags of one id or of lognormal length,
    power laws with exponents 0.6 to 1.3 or `exponent`."""
    rng = np.random.default_rng([seed, num_tables])
    rows = (10 ** rng.uniform(2, 7.3, num_tables)).astype(np.int64)
    dims = rng.choice([16, 32, 64, 128, 256], num_tables)
    bags = np.clip(rng.lognormal(2.0, 1.0, num_tables), 1, 200).round(1)
    lengths = np.where(rng.random(num_tables) < 0.5, 1.0, bags)
    law = rng.uniform(0.6, 1.3, num_tables) if exponent is None else np.full(num_tables, exponent)
    return _workload(rows.tolist(), dims.tolist(), lengths.tolist(), law.tolist(), 4096)


def giant(seed: int) -> Workload:
    """One table larger than a rank's memory, and twenty small ones."""
    rng = np.random.default_rng([seed, 21])
    rows = [400_000_000, *(10 ** rng.uniform(2, 6.5, 20)).astype(np.int64).tolist()]
    return _workload(rows, [128, *rng.choice([32, 64, 128], 20).tolist()], [1.0] * 21,
                     [1.05] * 21, 4096)


def few_tables(seed: int) -> Workload:
    """Four tables, fewer than there are ranks."""
    return _workload([5_000_000, 200_000, 30_000_000, 1000], [128, 64, 128, 32],
                     [4.0, 20.0, 1.0, 1.0], [1.05, 0.9, 1.1, 0.8], 4096)


def drawn(seed: int) -> Workload:
    """`synthetic` with a log-uniformly random number of tables from 3 to 1,000."""
    rng = np.random.default_rng([seed, 3])
    return synthetic(round(10 ** rng.uniform(np.log10(3), 3)), seed)


def cluster(num_ranks: int, seed: int) -> Topology:
    """CPU hosts with constants that ``oper calibrate`` measured on two cores of an Intel Xeon.
    Hosts have 2, 4 or 8 ranks and network bandwidths of 0.1 to 12.5 GB/s per rank; if `seed` % 3 is
    2, every second host has half the bandwidth."""
    rng = np.random.default_rng([seed, num_ranks])
    per_host = int(rng.choice([2, 4, 8]))
    cross_gbps = float(10 ** rng.uniform(-1, np.log10(12.5)))
    domains = [Domain((r,), r // per_host, int(96e9), 29.7 / 2, 700.0, 8 << 20, 29.7 / 2,
                      cross_gbps * (0.5 if seed % 3 == 2 and r // per_host % 2 else 1.0))
               for r in range(num_ranks)]
    costs = Costs(phase_us=74.76, id_ns=4.969, sort_ns=5.453, reduce_ns=5.453, update_ns=10.291,
                  refresh_ns=16.323, tier_ns=1.452, push_tier_ns=9.347, push_ns=11.336,
                  push_bag_ns=60.611, odd_ns=0.408, table_us=1.002, warm_share=0.4)
    return Topology(f"cluster-{num_ranks}", tuple(domains), costs, "measured")


def machine(num_ranks: int, unequal: bool = False) -> Topology:
    """Hosts of eight GPUs like H100s; if `unequal`, every second rank has half the memory and 0.6
    of the bandwidth."""
    domains = []
    for r in range(num_ranks):
        slow = unequal and r % 2 == 1
        speed = 0.6 if slow else 1.0
        domains.append(Domain((r,), r // 8, int(40e9 if slow else 80e9), 2512.0 * speed,
                              6280.0 * speed, int(50e6), 360.0, 40.0))
    kind = "unequal" if unequal else "h100-like"
    return Topology(f"{kind}-{num_ranks}", tuple(domains), Costs(phase_us=10.0), "published")
