"""Fixtures of the device back end's tests."""

from collections.abc import Iterator

import pytest

from tests.cuda import emulated


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The emulated device library instead of that of a GPU."""
    emulated.emulate(monkeypatch)
    return monkeypatch


@pytest.fixture
def on_device(emulation: pytest.MonkeyPatch) -> Iterator[None]:
    """`open_tables` and what builds on it open tables of the device back end."""
    with emulated.on_devices(emulation):
        yield
