"""Settings of all tests."""

import pytest
from hypothesis import settings

from tests.cuda import compiler

# No deadline: the first call into torch is slow, and the machine may be busy. The same examples
# every time, so that a failure belongs to a change; `--hypothesis-profile=search`
# looks for new ones.
settings.register_profile("same", max_examples=60, deadline=None, derandomize=True)
settings.register_profile("search", max_examples=1000, deadline=None)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for the CUDA compiler runs last."""
    items.sort(key=lambda item: item.path.name == "test_compiled.py")


def pytest_collection_finish(session: pytest.Session) -> None:
    """The CUDA compiler runs beside the tests, if any looks at what it makes."""
    wanted = any(item.path.name == "test_compiled.py" for item in session.items)
    if wanted and not session.config.option.collectonly:
        compiler.start()


def pytest_unconfigure() -> None:
    """The CUDA compiler ends with the tests."""
    compiler.end()
