"""Click-through rates of visits."""

from __future__ import annotations

import numpy as np

from oper.errors import InvalidInputError
from oper.rl_rec.intervals import Interval, bootstrap, ratio


def click_through_rate(clicks: np.ndarray, pages: np.ndarray, per_page: int = 10
                       ) -> dict[str, Interval]:
    """Compute clicks per shown item, with bootstrap intervals over E visits.

    Args:
        clicks: number of clicks of each visit, [E].
        pages: number of pages shown in each visit, >= 1, [E].
        per_page: items per page.

    Returns:
        ``"step"``: total clicks / total items, which weights visits by length; ``"episode"``: mean
        of the visits' rates. They differ if rates and lengths of visits are correlated.

    Raises:
        InvalidInputError: shapes differ, or numbers are out of range.
    """
    clicks, pages = np.asarray(clicks, np.float64), np.asarray(pages, np.float64)
    if (clicks.shape != pages.shape or clicks.ndim != 1 or (pages < 1).any() or per_page < 1
            or (clicks < 0).any() or (clicks > pages * per_page).any()):
        raise InvalidInputError(
            "cannot compute a click-through rate", "shapes and minima of clicks, pages",
            (clicks.shape, pages.shape, clicks.min(initial=0), pages.min(initial=1)),
            f"[E] each, with pages >= 1 and 0 <= clicks <= {per_page} * pages",
            "pass the counts of the same visits")
    shown = pages * per_page
    return {"step": ratio(clicks, shown), "episode": bootstrap(clicks / shown)}
