"""Workers of servers in this process are forks of a process that has imported torch."""

from collections.abc import Iterator

import pytest
import torch.multiprocessing

from oper.serve import Client, Server
from tests.forked import context_of_servers


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.multiprocessing, "get_context", context_of_servers)
        yield


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client of the module's server."""
    with Client(server.address, timeout_s=30) as client:
        yield client
