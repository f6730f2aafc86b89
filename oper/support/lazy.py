"""Names of a package that are loaded on first use, so that importing the package stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, Sequence[str]]
                 ) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """Public names of a package with their modules, its ``__getattr__`` and ``__dir__`` (PEP 562).

    Args:
        package: its ``__name__``.
        modules: the public names that each module holds.
    """
    names = {name: module for module, held in modules.items() for name in held}

    def get(name: str) -> Any:
        try:
            module = names[name]
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        return getattr(importlib.import_module(module), name)

    def listing() -> list[str]:
        return sorted([*vars(sys.modules[package]), *names])

    return names, get, listing
