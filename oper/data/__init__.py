"""Readers and preprocessing for real logs, synthetic logs and batches for training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.support.lazy import lazy_exports

_PUBLIC, __getattr__, __dir__ = lazy_exports(__name__, {
    "oper.data.recipe": ("Recipe", "load_recipe"),
    "oper.data.preprocessing.options": ("PreprocessOptions",),
    "oper.data.preprocessing.run": ("preprocess",),
    "oper.data.folder": ("Folder",),
    "oper.data.analyze": ("analyze_folder",),
    "oper.data.loading.loader": ("Loader", "LoaderOptions"),
    "oper.data.generate.synthetic": ("SyntheticLog", "write_synthetic_log"),
    "oper.data.preprocessing.sequences": ("write_sequences",),
    "oper.data.generate.ids": ("power_law_ids",),
    "oper.data.vocabulary.raw_keys": ("raw_keys",),
})

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
    from oper.data.vocabulary.raw_keys import raw_keys as raw_keys
