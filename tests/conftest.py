"""Settings for all tests."""

import gc
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests import schedule

# No deadline, since the first call into torch is slow and the machine may be busy. Every run has
# the same examples, so that only a change of the code can make a test fail. The profiles "nightly"
# and "search" (`--hypothesis-profile`) draw new examples, also under CI=true, where hypothesis
# would derandomize by default.
settings.register_profile("same", max_examples=60, deadline=None, derandomize=True)
for name, examples in (("nightly", 200), ("search", 1000)):
    settings.register_profile(name, max_examples=examples, deadline=None, derandomize=False,
                              print_blob=True)
settings.load_profile("same")


def pytest_configure() -> None:
    """Let Ctrl-C reach the processes that tests start, even if a shell has started pytest in the
    background with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Runs before pytest selects tests by their markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    schedule.arrange(items)


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collections, which would otherwise take part of a
    second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Yield the URL of a file or folder in an S3 bucket, with ``{}`` in place of its name."""
    from oper.bench.data.store import s3_server
    from oper.errors import MissingDependencyError

    try:
        with s3_server() as url:
            yield url
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, checks its result and returns what it prints."""
    from tests.support import run_command

    def call(*words: object, status: int = 0) -> str:
        capsys.readouterr()
        assert run_command(*words) == status
        return capsys.readouterr().out

    return call
