"""Readers and preprocessing for real logs, synthetic logs and batches for training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.support.lazy import lazy_exports

_PUBLIC = {
    "Recipe": "oper.data.recipe",
    "load_recipe": "oper.data.recipe",
    "PreprocessOptions": "oper.data.preprocessing.options",
    "preprocess": "oper.data.preprocessing.run",
    "Folder": "oper.data.folder",
    "analyze_folder": "oper.data.analyze",
    "Loader": "oper.data.loading.loader",
    "LoaderOptions": "oper.data.loading.loader",
    "SyntheticLog": "oper.data.generate.synthetic",
    "write_sequences": "oper.data.preprocessing.sequences",
    "write_synthetic_log": "oper.data.generate.synthetic",
    "power_law_ids": "oper.data.generate.ids",
}

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from oper.data.analyze import analyze_folder as analyze_folder
    from oper.data.folder import Folder as Folder
    from oper.data.generate.ids import power_law_ids as power_law_ids
    from oper.data.generate.synthetic import (
        SyntheticLog as SyntheticLog,
        write_synthetic_log as write_synthetic_log,
    )
    from oper.data.loading.loader import Loader as Loader, LoaderOptions as LoaderOptions
    from oper.data.preprocessing.options import PreprocessOptions as PreprocessOptions
    from oper.data.preprocessing.run import preprocess as preprocess
    from oper.data.preprocessing.sequences import write_sequences as write_sequences
    from oper.data.recipe import Recipe as Recipe, load_recipe as load_recipe

__getattr__, __dir__ = lazy_exports(__name__, _PUBLIC)
