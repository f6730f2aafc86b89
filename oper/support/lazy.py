"""Lazy imports of a package's public names, so that importing the package is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, Sequence[str]]
                 ) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """Create the ``__getattr__`` and ``__dir__`` of a package (PEP 562) for lazy imports.

    Args:
        package: ``__name__`` of the package.
        modules: maps module names to the public names to import from them.

    Returns:
        A mapping from public names to modules, ``__getattr__``, and ``__dir__``.
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
