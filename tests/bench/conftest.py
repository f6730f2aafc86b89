"""Fork the benchmarks' child processes, except in tests of the processes themselves."""

from collections.abc import Iterator

import pytest

_FRESH = ("test_bench_record", "test_bench_cluster", "test_bench_data", "test_launch")


@pytest.fixture(scope="module", autouse=True)
def forked_children(request: pytest.FixtureRequest) -> Iterator[None]:
    from oper.bench.core import child
    from tests.forked import FORKS

    if request.module.__name__.rpartition(".")[2] in _FRESH:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "subprocess", FORKS)
        yield
