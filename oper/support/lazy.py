"""Names of a package that are loaded on first use, so that importing the package stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, names: Mapping[str, str]
                 ) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` (PEP 562) for a package.

    Args:
        package: its ``__name__``.
        names: the module that holds each public name.
    """

    def get(name: str) -> Any:
        try:
            module = names[name]
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        return getattr(importlib.import_module(module), name)

    def listing() -> list[str]:
        return sorted([*vars(sys.modules[package]), *names])

    return get, listing
