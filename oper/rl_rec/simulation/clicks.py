"""Click-through rates of visits."""

from __future__ import annotations

import numpy as np

from oper.errors import InvalidInputError
from oper.rl_rec.intervals import Interval, bootstrap, ratio

ITEMS = 10  # items on a page


def click_through_rate(clicks: np.ndarray, pages: np.ndarray) -> dict[str, Interval]:
    """Compute clicks per shown item, with bootstrap intervals over E visits.

    Args:
        clicks: number of clicks of each visit, [E]; or [S, E] for policies of S training seeds that
            served the same customers. Seeds and customers are both resampled then, since visits of
            one customer, or under one policy, are not independent.
        pages: number of pages of `ITEMS` items shown in each visit, >= 1, of the same shape.

    Returns:
        ``"step"``: total clicks / total shown items, which weights visits by length;
        ``"episode"``: mean of the visits' rates. They differ if rates and lengths of visits are
        correlated.

    Raises:
        InvalidInputError: shapes differ, or numbers are out of range.
    """
    clicks, pages = np.asarray(clicks, np.float64), np.asarray(pages, np.float64)
    what, todo = "cannot compute a click-through rate", "pass the counts of the same visits"
    if clicks.shape != pages.shape or clicks.ndim not in (1, 2):
        raise InvalidInputError(what, "shapes of clicks, pages", (clicks.shape, pages.shape),
                                "[E] each, or [S, E] each", todo)
    shown = pages * ITEMS
    wrong = (pages < 1) | (clicks < 0) | (clicks > shown)
    if wrong.any():
        k = int(wrong.argmax())
        raise InvalidInputError(what, f"clicks, pages of visit {k}",
                                (float(clicks.flat[k]), float(pages.flat[k])),
                                f"pages >= 1, 0 <= clicks <= {ITEMS} * pages", todo)
    return {"step": ratio(clicks, shown), "episode": bootstrap(clicks / shown)}
