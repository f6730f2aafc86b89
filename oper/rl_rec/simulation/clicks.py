"""Click-through rate of visits to a simulator or a shop."""

from __future__ import annotations

import numpy as np

from oper.errors import InvalidInputError
from oper.rl_rec.intervals import Interval, bootstrap, ratio


def click_through_rate(clicks: np.ndarray, pages: np.ndarray, per_page: int = 10
                       ) -> dict[str, Interval]:
    """Clicks per item shown, with bootstrap intervals over visits.

    Args:
        clicks: [E], number of clicks of each visit.
        pages: [E], pages that each visit was shown, >= 1.
        per_page: items on a page.

    Returns:
        ``"step"``: sum clicks / sum items, where long visits weigh more; ``"episode"``: the mean
        over visits of each one's own rate. The two differ if the length of a visit depends on the
        items shown.
    """
    clicks, pages = np.asarray(clicks, np.float64), np.asarray(pages, np.float64)
    if (clicks.shape != pages.shape or clicks.ndim != 1 or (pages < 1).any() or per_page < 1
            or (clicks < 0).any() or (clicks > pages * per_page).any()):
        raise InvalidInputError(
            "cannot give a click-through rate", "clicks, pages", (clicks.shape, pages.shape),
            f"[E] each, pages >= 1 and 0 <= clicks <= {per_page} * pages", "count again")
    shown = pages * per_page
    return {"step": ratio(clicks, shown), "episode": bootstrap(clicks / shown)}
