"""Fixtures of the device back end's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda import emulated


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Use the emulated device library, and build it before ranks wait for each other."""
    emulated.load()
    monkeypatch.setattr("oper.shmem.library.load_device", emulated.load)
    monkeypatch.setenv("OPER_OUTBOX_BYTES", str(4 << 20))
    yield monkeypatch


@pytest.fixture
def on_device(emulation: pytest.MonkeyPatch) -> Iterator[None]:
    """`open_tables` and what builds on it open tables of the device back end."""
    with emulated.on_devices(emulation):
        yield
