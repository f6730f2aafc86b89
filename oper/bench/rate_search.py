"""The highest rate at which a run is VALID, found by runs of LoadGen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from oper.bench.loadgen import Result

_RAISE, _LOWER = 1.2, 0.7  # while only valid, or only invalid, rates are known
_STEP_BACK = 0.94  # when the rate does not hold for longer


@dataclass(slots=True)
class Bracket:
    """What is known of a contender.

    Attributes:
        first: rate of the first run, queries per second.
        valid, invalid: highest valid rate and lowest invalid one above it; 0 = none yet.
        runs: every rate tried and whether it was valid.
    """

    first: float
    valid: float = 0.0
    invalid: float = 0.0
    runs: list[tuple[float, bool]] = field(default_factory=list)

    def next_rate(self) -> float:
        """Where to look now."""
        if not self.runs:
            return self.first
        if not self.invalid:
            return self.valid * _RAISE
        if not self.valid:
            return self.invalid * _LOWER
        return (self.valid + self.invalid) / 2

    def take(self, rate: float, valid: bool) -> None:
        """Note a run."""
        self.runs.append((round(rate, 2), valid))
        if valid:
            self.valid = max(self.valid, rate)
            if self.invalid and self.invalid <= self.valid:
                self.invalid = 0.0  # the earlier failure was a disturbance
        elif rate > self.valid:
            self.invalid = min(self.invalid or rate, rate)


def search(brackets: Mapping[str, Bracket], run: Callable[[str, float], Result], steps: int
           ) -> None:
    """Bisect all contenders' rates, turn by turn, so that a disturbance meets all of them."""
    names = list(brackets)
    for step in range(steps):
        shift = step % len(names)
        for name in names[shift:] + names[:shift]:
            rate = brackets[name].next_rate()
            brackets[name].take(rate, run(name, rate).valid)


def confirm(brackets: Mapping[str, Bracket], run: Callable[[str, float], Result], tries: int
            ) -> dict[str, tuple[float, Result]]:
    """Longer runs at the rates found; a rate that does not hold is lowered and tried again.

    Returns:
        The rate and its run by contender; the last run where none was valid.
    """
    rates = {n: b.valid or b.next_rate() for n, b in brackets.items()}
    found: dict[str, tuple[float, Result]] = {}
    for _ in range(tries):
        for name, rate in rates.items():
            if name in found and found[name][1].valid:
                continue
            found[name] = rate, run(name, rate)
            if not found[name][1].valid:
                rates[name] = rate * _STEP_BACK
    return found
