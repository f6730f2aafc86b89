"""The quick profile of the program fuzzer, which must find the planted faults.

The long profile: ``python -m tests.programs --seeds 0:20000``, and ``--world-size 2 --seeds
0:2000``.
"""

import re
from collections.abc import Iterator

import pytest

from tests.programs.differences import DIFFERENCES
from tests.programs.faults import FAULTS
from tests.programs.oracle import Finding
from tests.programs.program import Program, draw_program
from tests.programs.runner import Totals, run_seeds, smallest
from tests.programs.table import ACTIONS
from tests.programs.workers import BROKEN, Local, Processes
from tests.support import ROOT

QUICK = {1: range(120), 2: range(40)}
FEW = {1: range(1, 120, 3), 2: range(1, 40, 3)}  # of these; those of one rank have every action


def check(totals: Totals, world_size: int) -> None:
    """Fail with the smallest program of the first failure."""
    for seed, program, finding in totals.findings.values():
        program, finding = smallest(program, finding, local=world_size == 1, budget=60)
        pytest.fail(f"seed {seed}: {finding.text}\n{program.text()}", pytrace=False)


def test_one_rank() -> None:
    totals = run_seeds(FEW[1], 1, jobs=0, quiet=True)
    check(totals, 1)
    tried = {name for name, _ in totals.counts}
    assert {name for name, action in ACTIONS.items() if action.weight >= 0.5} <= tried
    assert totals.programs == len(FEW[1])


def test_two_ranks() -> None:
    check(run_seeds(FEW[2], 2, quiet=True), 2)


@pytest.mark.parametrize("world_size", QUICK)
def test_more_programs(world_size: int) -> None:
    seeds = [seed for seed in QUICK[world_size] if seed not in FEW[world_size]]
    check(run_seeds(seeds, world_size, quiet=True), world_size)


@pytest.fixture(scope="module")
def clean() -> Iterator[dict[int, Finding | None]]:
    """Yield the results of programs without a fault, by seed, computed when needed."""
    yield {}


@pytest.mark.parametrize("name", list(FAULTS))
def test_planted_faults_are_found(name: str, clean: dict[int, Finding | None]) -> None:
    """A quick seed must fail that does not fail without the fault."""
    actions, _ = FAULTS[name]
    sound, faulty = Local(), Local(name)
    try:
        for seed in QUICK[1]:
            program = draw_program(seed, 1)
            if not set(actions) & {a for a, _ in program.actions}:
                continue  # only to be quick
            if faulty.run(program).finding is None:
                continue
            if seed not in clean:
                clean[seed] = sound.run(program).finding
            if clean[seed] is None:
                return
    finally:
        sound.close()
        faulty.close()
    pytest.fail(f"nothing found among seeds {QUICK[1]}")


def test_a_fault_of_two_ranks_is_found() -> None:
    totals = run_seeds(QUICK[2], 2, fault="frozen tables are trained", only="freeze", stop_at=1,
                       quiet=True)
    (finding,) = [f for _, _, f in totals.findings.values()]
    assert finding.action.startswith("freeze")


def test_processes_that_end_are_a_finding_and_are_replaced() -> None:
    """After such a finding, the next program runs."""
    worker = Processes(1)
    try:
        program = draw_program(0, 1)
        worker.run(Program(program.model, program.optimizer))
        assert worker._world is not None
        worker._world.processes[0].kill()
        worker._world.processes[0].join()
        report = worker.run(program)
        assert report.finding is not None and report.finding.kind == BROKEN
        assert worker.run(Program(program.model, program.optimizer)).finding is None
    finally:
        worker.close()


def test_a_printed_program_can_be_run_again() -> None:
    for seed in range(20):
        for world_size in (1, 2):
            program = draw_program(seed, world_size)
            assert program == draw_program(seed, world_size)
            assert eval(program.text(), {"Program": Program}) == program


def test_the_differences_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs/reference/what-changes.md").read_text()
    found = {int(n): heading for n, heading in re.findall(r"^## (\d+)\. (.+)$", text, re.MULTILINE)}
    assert found == DIFFERENCES
    assert {a.difference for a in ACTIONS.values()} - {None} <= set(DIFFERENCES)
