"""Readers and preprocessing for real logs, synthetic logs and batches for training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.lazy import lazy_exports

_PUBLIC = {
    "Recipe": "oper.data.recipe",
    "load_recipe": "oper.data.recipe",
    "PreprocessOptions": "oper.data.options",
    "preprocess": "oper.data.preprocessing",
    "Folder": "oper.data.folder",
    "analyze_folder": "oper.data.analyze",
    "ArrayBatch": "oper.data.batches",
    "BatchOptions": "oper.data.batches",
    "Batches": "oper.data.batches",
    "Loader": "oper.data.loader",
    "LoaderOptions": "oper.data.loader",
    "SyntheticLog": "oper.data.synthetic",
    "write_synthetic_log": "oper.data.synthetic",
    "power_law_ids": "oper.data.ids",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from oper.data.analyze import analyze_folder as analyze_folder
    from oper.data.batches import (
        ArrayBatch as ArrayBatch,
        Batches as Batches,
        BatchOptions as BatchOptions,
    )
    from oper.data.folder import Folder as Folder
    from oper.data.ids import power_law_ids as power_law_ids
    from oper.data.loader import Loader as Loader, LoaderOptions as LoaderOptions
    from oper.data.options import PreprocessOptions as PreprocessOptions
    from oper.data.recipe import Recipe as Recipe, load_recipe as load_recipe
    from oper.data.synthetic import (
        SyntheticLog as SyntheticLog,
        write_synthetic_log as write_synthetic_log,
    )

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
