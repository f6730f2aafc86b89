"""A digest of a planning problem, which ties a plan's bound to its problem."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import numpy as np

from oper.search.problem.overlap import overlap_to_json
from oper.search.problem.statement import Problem


def problem_digest(problem: Problem) -> str:
    """SHA-256 (hexadecimal) of everything that a bound depends on: tables, access curves, machine,
    costs, objective, batch size, plan space, constraints, overlap and message bits."""
    machine = problem.machine
    stated = {"topology": asdict(problem.topology), "objective": problem.objective,
              "batch_size": problem.batch_size, "allow": sorted(problem.allow),
              "constraints": problem.constraints.to_json(),
              "overlap": overlap_to_json(problem.overlap),
              "tables": [t.spec.to_json() for t in problem.tables],
              "message_bits": problem.message_bits.to_json()}
    out = hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode())
    arrays = [machine.capacity_bytes, machine.host_capacity_bytes]
    for t in problem.tables:
        arrays += [t.edges, t.cumulative, t.traffic.lengths, t.traffic.length_share,
                   np.array([t.traffic.num_ids, t.traffic.num_bags, float(t.ids_are_positions)])]
        if t.default_share is not None:
            arrays.append(np.array([t.default_share]))
        if t.traffic.samples_per_bag != 1:
            arrays.append(np.array([t.traffic.samples_per_bag]))
        if t.spec.name in problem.constraints.tables:  # pinned rows may be named by id
            arrays += [t.explicit_ids, t.explicit]
    for x in arrays:
        out.update(f"{x.dtype}{x.shape}".encode())
        out.update(np.ascontiguousarray(x).tobytes())
    return out.hexdigest()
