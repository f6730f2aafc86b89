"""Scoring server: worker processes that share one set of tables score requests in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oper.support.lazy import lazy_exports

_PUBLIC, __getattr__, __dir__ = lazy_exports(__name__, {
    "oper.serve.batching": ("Batcher",),
    "oper.serve.options": ("BatchOptions", "ServeOptions", "TieredRows"),
    "oper.serve.client": ("Client",),
    "oper.serve.requests": ("Predictor", "Request", "Signature"),
    "oper.serve.model": ("PublishedModel", "load_model"),
    "oper.serve.server": ("Server",),
})

__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from oper.serve.batching import Batcher as Batcher
    from oper.serve.client import Client as Client
    from oper.serve.model import PublishedModel as PublishedModel, load_model as load_model
    from oper.serve.options import (
        BatchOptions as BatchOptions,
        ServeOptions as ServeOptions,
        TieredRows as TieredRows,
    )
    from oper.serve.requests import (
        Predictor as Predictor,
        Request as Request,
        Signature as Signature,
    )
    from oper.serve.server import Server as Server
