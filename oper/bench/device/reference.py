"""Compare a contender's results on a device with a float64 reference, before timing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oper.bench.device.cases import DeviceCase, Inputs
from oper.bench.device.contenders import Side, initial_rows
from oper.bench.tables.unsharded import EPS, LEARNING_RATE
from oper.bench.tables.verify import Verdict
from oper.train.reference import SparseTableOptimizer

# max|a - b| <= tolerance * max|b|: float16 rows may round to either neighbour in every step.
ROWS_TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
_SAMPLES = 64


class Reference:
    """Pooled rows, and rows after steps of row-wise Adagrad (`SparseTableOptimizer`, FBGEMM's
    EXACT_ROWWISE_ADAGRAD), in float64.

    Args:
        case: the case.
        device: the device that computes the reference.
        steps: batches to train on, in order.
        gradient: output gradient of every step, float32 [B, T * D].
    """

    def __init__(self, case: DeviceCase, device: torch.device, steps: Sequence[Inputs],
                 gradient: torch.Tensor) -> None:
        self._case = case
        self.samples = torch.arange(0, case.work.batch_size,
                                    max(1, case.work.batch_size // _SAMPLES), device=device)
        self.pooled: list[torch.Tensor] = []  # [samples, D] by table, of the first step's batch
        self.ids: list[torch.Tensor] = []  # touched, by table
        self.rows: list[torch.Tensor] = []
        for table in range(len(case.work.num_rows)):
            weight = initial_rows(case, table, device)
            bags = steps[0].by_table[table].view(-1, case.work.pooling)[self.samples]
            self.pooled.append(weight[bags].double().sum(1))
            of_table = gradient[:, table * case.work.dim:(table + 1) * case.work.dim]
            touched = torch.unique(torch.cat([x.by_table[table] for x in steps]))
            bag = torch.nn.EmbeddingBag.from_pretrained(weight[touched].double(), freeze=False,
                                                        mode="sum")
            optimizer = SparseTableOptimizer(bag, "rowwise_adagrad", LEARNING_RATE, EPS)
            for x in steps:
                optimizer.zero_grad()
                at = torch.searchsorted(touched, x.by_table[table])
                bag(at.view(-1, case.work.pooling)).backward(of_table.double())
                optimizer.step()
            self.ids.append(touched)
            self.rows.append(bag.weight.detach())

    def check_lookup(self, side: Side, first: Inputs) -> dict[str, Any]:
        """Compare a contender's pooled rows of the first batch, before it trains; returns
        `Verdict.to_json`."""
        verdict = Verdict({"pooled": side.tolerance})
        verdict.compare("pooled", side.lookup(first)[self.samples].double(),
                        torch.cat(self.pooled, 1))
        return verdict.to_json()

    def check_rows(self, side: Side) -> dict[str, Any]:
        """Compare the rows that the steps touched, after a contender has trained; returns
        `Verdict.to_json`."""
        assert side.rows is not None
        verdict = Verdict({"rows": ROWS_TOLERANCE[self._case.dtype]})
        for table, ids in enumerate(self.ids):
            verdict.compare("rows", side.rows(table, ids).double(), self.rows[table].cpu())
        return verdict.to_json()
