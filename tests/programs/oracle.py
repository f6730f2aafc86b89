"""Runs a program on both sides and compares them after every action."""

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from oper.errors import OperError, PeerLostError
from tests.programs import differences
from tests.programs.program import Program
from tests.programs.sharded import Sharded
from tests.programs.sides import Talk, Unsharded
from tests.programs.table import ACTIONS, Action, Seen

# Outcomes of an action; the last three are failures.
AGREED, BOTH, ALONE, DIFFERENT, RAW, ACCEPTED = (
    "agreed", "refused on both sides", "refused by OPER alone", "different", "raw error",
    "accepted by OPER alone")
OUTCOMES = (AGREED, BOTH, ALONE, DIFFERENT, RAW, ACCEPTED)
_CLOSE = {False: (2e-5, 5e-6), True: (1e-2, 1e-2)}  # rtol and atol, by whether 16 bits are involved


@dataclass
class Finding:
    """A failure.

    Attributes:
        kind: DIFFERENT, RAW or ACCEPTED.
        action: name of the action that showed it; "shard" if sharding itself failed.
        number: index of the action in the program.
        text: description.
    """

    kind: str
    action: str
    number: int
    text: str

    @property
    def signature(self) -> tuple[str, str, str]:
        """Kind and place of the failure, which stay the same while the program is shrunk."""
        return self.kind, self.action, self.text.split(":")[0]


@dataclass
class Report:
    """The result of a program.

    Attributes:
        counts: by action and outcome.
        refusals: texts of refusals by OPER alone, by action.
        finding: the failure that ended it, or None.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    finding: Finding | None = None


class _Failure(Exception):
    """Carries a finding's kind and text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


def run(program: Program, talk: Talk) -> Report:
    """Run a program; on several ranks, all of them call this."""
    report = Report()
    with warnings.catch_warnings(), _group(program), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(program.model["seed"])
        sharded: Sharded | None = None
        number, name = -1, "shard"
        try:
            sharded, error = _attempt(lambda: Sharded(program.model, program.optimizer, talk,
                                                      program.plan, program.wrapper))
            if error is not None:
                if not isinstance(error, OperError):
                    raise _Failure(RAW, _text_of(error))
                _count(report, name, ALONE, error)
                return report
            assert sharded is not None
            reference = Unsharded(program.model, program.optimizer, talk)
            reference.wrapper = program.wrapper  # which some actions have to know
            sides = _Sides(sharded, reference, talk)
            sides.compare(exact=True)
            report.counts[name, AGREED] += 1
            for number, (name, args) in enumerate(program.actions):  # noqa: B007
                sides.act(ACTIONS[name], args, report)
        except _Ended:
            pass
        except _Failure as failure:
            report.counts[name, failure.kind] += 1
            report.finding = Finding(failure.kind, name, number, failure.text)
        finally:
            if sharded is not None:
                with contextlib.suppress(Exception):  # of a model that a finding has left behind
                    sharded.close()
    return report


@contextlib.contextmanager
def _group(program: Program) -> Iterator[None]:
    """Create a process group of one rank if a program needs it."""
    if program.world_size > 1 or not program.dist:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _attempt(what: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return what(), None
    except Exception as error:
        # Frames would keep tensors of a graph alive, and with them the tables' last batch.
        if not isinstance(error, OperError):
            error.text = "".join(traceback.format_exception(error, limit=-4))  # type: ignore
        return None, error.with_traceback(None)


def _text_of(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def _count(report: Report, name: str, outcome: str, error: Exception | None = None) -> None:
    report.counts[name, outcome] += 1
    if outcome == ALONE and error is not None:
        report.refusals[name, str(error).partition(":")[0]] += 1


class _Ended(Exception):
    """The program ends here, because of difference 11."""


class _Sides:
    """Both sides of a program."""

    def __init__(self, sharded: Sharded, reference: Unsharded, talk: Talk) -> None:
        self.sharded, self.reference, self.talk = sharded, reference, talk
        self.half = any(t.half for t in sharded.tables)
        self.refused_batch = False  # on several ranks, after which training may have ended

    def act(self, action: Action, args: dict[str, Any], report: Report) -> None:
        """Run an action on both sides and compare them."""
        got, error = _attempt(lambda: action.run(self.sharded, args))
        lost = isinstance(error, PeerLostError) or "aborted this exchange" in str(error)
        codes = self.talk.exchange(2 if lost else int(error is not None))
        if self.refused_batch and 2 in codes:
            _count(report, action.name, ALONE, error)
            raise _Ended
        self.refused_batch |= (any(codes) and action.difference == differences.ENDS
                               and self.talk.world_size > 1)
        failure: _Failure | None = None
        try:
            if any(codes):
                if not all(codes):
                    raise _Failure(DIFFERENT, "ranks: one has raised "
                                   f"{_text_of(error) if error else 'nothing'}")
                assert error is not None
                outcome = self._refused(action, args, error)
            else:
                self._accepted(action, args, got or {})
                outcome = AGREED
            _count(report, action.name, outcome, error)
            if error is not None or action.otherwise is not None:  # what a careful user does
                for p in (*self.sharded.dense(), *self.reference.dense()):
                    p.grad = None
        except _Failure as found:
            failure = found
        codes = self.talk.exchange(int(failure is not None))
        if failure is None and any(codes):
            failure = _Failure(DIFFERENT, "ranks: another rank has found a difference")
        if failure is not None:
            raise failure

    def _accepted(self, action: Action, args: dict[str, Any], got: Seen) -> None:
        other = self.reference.clone() if action.otherwise else self.reference
        want, error = _attempt(lambda: action.run(other, args))
        if error is None:
            self.reference = other
        elif action.otherwise is not None:
            want, error = _attempt(lambda: action.otherwise(self.reference, args))
        if error is not None:
            raise _Failure(ACCEPTED, f"accepted: torch raises {_text_of(error)}")
        self.reference.prepare()
        # Ranks that freeze all tables compare this in one more update, for which outputs require
        # gradients.
        if self.talk.world_size > 1 and want and want.get("=requires_grad") is False:
            got = {**got, "=requires_grad": False}
        _compare_seen(got, want or {}, self.half)
        self.compare(action.exact(args))

    def _refused(self, action: Action, args: dict[str, Any], error: Exception) -> str:
        """Determine what the unsharded side does after the sharded side has raised an error."""
        other = self.reference.clone()
        _, theirs = _attempt(lambda: action.run(other, args))
        ours = isinstance(error, OperError)
        if theirs is None:
            if not ours:
                raise _Failure(RAW, f"raw error: {_text_of(error)}\n{getattr(error, 'text', '')}")
            if not action.may_refuse(args):
                raise _Failure(RAW, f"refused, though it must work: {_text_of(error)}")
            self.compare(True, "after a refusal, ")
            return ALONE
        if not ours and not isinstance(theirs, type(error)) and not isinstance(
                error, type(theirs)):
            raise _Failure(RAW, f"raw error: {_text_of(error)}, where torch raises "
                           f"{_text_of(theirs)}\n{getattr(error, 'text', '')}")
        before = self.reference
        try:
            self.compare(action.exact(args), "after a refusal, ")
            return BOTH
        except _Failure:
            self.reference = other
            other.prepare()
        try:
            self.compare(action.exact(args))
        except _Failure:
            self.reference = before
            self.compare(action.exact(args), "after an error on both sides, ")
        return BOTH

    def compare(self, exact: bool, when: str = "") -> None:
        """Compare rows, optimizer states and the dense layer; the reference continues from the
        sharded side's numbers, which agree with its own."""
        found, error = _attempt(lambda: (self.sharded.rows(), self.sharded.states(),
                                         self.sharded.dense_state()))
        if error is not None:
            raise _Failure(RAW, f"{when}the state cannot be read: {_text_of(error)}\n"
                           f"{getattr(error, 'text', '')}")
        rows, states, dense = found
        for what, got, want, is_exact in (
                ("rows", rows, self.reference.rows(), exact),
                ("state", states, self.reference.states(), False),
                ("dense", dense, self.reference.dense_state(), False)):
            if got.keys() != want.keys():
                raise _Failure(DIFFERENT, f"{when}{what}: names {list(got)}, want {list(want)}")
            for name, x in got.items():
                problem = _differs(x, want[name], is_exact, self.half)
                if problem:
                    raise _Failure(DIFFERENT, f"{when}{what}: {name} {problem}")
        self.reference.adopt(rows, states, dense)


def _compare_seen(got: Seen, want: Seen, half: bool) -> None:
    if got.keys() != want.keys():
        raise _Failure(DIFFERENT, f"seen: {sorted(got.keys() ^ want.keys())} on one side only")
    for name, value in got.items():
        problem = _differs(value, want[name], name.startswith("="), half)
        if problem:
            raise _Failure(DIFFERENT, f"{name.lstrip('=')}: {problem}")


def _differs(got: Any, want: Any, exact: bool, half: bool) -> str | None:
    """Describe the difference of two values; None if they agree."""
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return None if _same(got, want) else f"is {_short(got)}, want {_short(want)}"
    kinds = [(x.device.type, x.dtype, tuple(x.shape)) for x in (got, want)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]}, want {kinds[1]}"
    if torch.equal(got, want):
        return None
    got, want = got.detach().double(), want.detach().double()
    rtol, atol = (0.0, 0.0) if exact else _CLOSE[half]
    if torch.allclose(got, want, rtol, atol, equal_nan=True):
        return None
    gap = (got - want).abs().nan_to_num(float("inf"))
    at = int(gap.argmax())
    return (f"differs by {gap.max():.3g}: {got.reshape(-1)[at]:.6g}, want "
            f"{want.reshape(-1)[at]:.6g} at {at}, {int((gap > 0).sum())} of {gap.numel()} numbers")


def _same(got: Any, want: Any) -> bool:
    """Whether plain values are equal; NaN equals NaN."""
    return bool(got == want) or repr(got) == repr(want)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else text[:300] + "..."

