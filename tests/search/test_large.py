"""Planning of very large tables from a histogram and a head, without counts of single rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import re
from pathlib import Path
import numpy as np
from search_cases import gpus
from oper.search import make_plan
from oper.stats import AccessStats, TableStats
from oper.tables import TableSpec
specs, stats = [], {}
for k in range(8):
    num_rows = 10**9 if k < 4 else 10**6
    head = 2_000_000_000 // np.arange(100, 300_100)  # Zipf-like, hottest first
    cold = num_rows - head.size
    rows = np.array([cold - cold // 2 - cold // 4, cold // 2, cold // 4])
    num_ids = int(head.sum() + rows @ [0, 1, 3])
    specs.append(TableSpec(f"t{k}", num_rows, 16, (f"f{k}",)))
    stats[f"t{k}"] = TableStats(num_rows, np.arange(head.size) * 3, head, np.array([0, 1, 3]), rows,
                                np.array([1]), np.array([num_ids]))
plan = make_plan(specs, AccessStats(num_ids, stats, "", False), gpus(8), batch_size=4096)
assert 0 <= plan.gap <= 0.05, plan.gap
assert [t.table.num_rows for t in plan.tables] == [s.num_rows for s in specs]
# Not getrusage, which includes the peak of the parent process before exec.
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""


def test_billions_of_rows_are_planned_in_little_memory() -> None:
    """4e9 rows (dense counts would take 32 GB) within 4 GiB, in a separate process."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1])])
    out = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False,
                         env={**os.environ, "PYTHONPATH": path})
    assert out.returncode == 0, out.stderr
    print(f"peak {out.stdout.strip()} MiB")
    assert int(out.stdout) < 4096
