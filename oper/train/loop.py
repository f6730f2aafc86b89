"""The training loop, with validation, the metrics file, interrupts and the final state."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

import torch

from oper.errors import InvalidInputError, OperError, PeerLostError, fail
from oper.integration.checkpoint.saving import tables_of
from oper.shmem.tables import ShardedTables
from oper.support.files import errors_name, write_text
from oper.support.versions import versions
from oper.train.config import TrainConfig
from oper.train.engines import Engine
from oper.train.meters import KeyMeter, by_phase, take_phases
from oper.train.metrics import sum_over_ranks
from oper.train.model import full_state, ranks, save_state
from oper.train.resume import (
    CONFIG,
    EARLIER,
    STATE,
    Checkpoints,
    cut_metrics,
    forgotten,
    has_checkpoint,
)
from oper.train.tasks import Task, make_task, progress_bar

if TYPE_CHECKING:
    from oper.tracing import Trace

METRICS = "metrics.jsonl"
_SECOND_CTRL_C_S = 1.0  # signals within this time are one: launchers forward the terminal's Ctrl-C


def train(config: TrainConfig, show_progress: bool = True, resume: bool = False
          ) -> dict[str, Any]:
    """Train and validate a model. Collective over the default process group.

    Rank 0 writes to ``config.out``: ``config.json`` (configuration, tables and versions),
    ``metrics.jsonl`` (one object per line) and ``state.pt`` (the ``state_dict`` of the unsharded
    model).

    Args:
        config: the run's configuration.
        show_progress: whether to show progress bars.
        resume: continue from the checkpoint in ``config.out``, if there is one. With the same
            number of ranks, results are bit-identical to those of an uninterrupted run.

    Returns:
        ``steps``, ``interrupted`` and ``state`` (path of ``state.pt``); ``trace`` (its path) if one
        was written; and unless interrupted, metrics over the validation split: ``auc``,
        ``log_loss`` and ``samples`` for a DLRM, ``ndcg@10``, ... and ``users`` for a recommender.

    Raises:
        OperError: the data cannot be read, the configuration is invalid, or a peer has exited.
    """
    rank, world_size = ranks()
    out = Path(config.out)
    goes_on = resume and has_checkpoint(out)
    old = None if goes_on else forgotten(out)
    task = make_task(config)
    total = _total(config, task)
    engine = task.engine()
    done = 0
    checkpoints = Checkpoints(engine, config, task.samples()) if (
        goes_on or config.checkpoint_every or config.start) else None
    with _peer_errors(engine):
        if goes_on and checkpoints:
            engine.num_steps = done = checkpoints.load()
            if rank == 0:
                cut_metrics(out / METRICS, done, _validates(config, done, total))
        else:
            if config.start and checkpoints:
                checkpoints.start_from(config.start)
            if rank == 0:
                if old is not None:
                    old.remove()
                (out / EARLIER).unlink(missing_ok=True)
                # Otherwise a server would take an earlier run's state for this run's.
                (out / STATE).unlink(missing_ok=True)
    metrics = _MetricsFile(out if rank == 0 else None, {
        "config": config.to_json(), "versions": versions() if rank == 0 else {},
        "world_size": world_size, "model": task.about()}, done > 0)
    with _peer_errors(engine), metrics as log:
        tracing = _traced(engine, config, done)
        with checkpoints or contextlib.nullcontext(), tracing or contextlib.nullcontext():
            steps, interrupted = _run(engine, config, task, log, show_progress, checkpoints,
                                      tracing)
            if tracing:
                _write(tracing)
        result: dict[str, Any] = {"steps": steps, "interrupted": interrupted}
        if tracing and tracing.is_written:
            result["trace"] = config.trace
        state = full_state(engine.module)
        if rank == 0:
            save_state(out / STATE, state)
        if not interrupted:
            result |= task.evaluate(engine, show_progress)
        result["state"] = str(out / STATE)
        log.write("end", **result)
    return result


def _run(engine: Engine, config: TrainConfig, task: Task, log: _MetricsFile, show_progress: bool,
         checkpoints: Checkpoints | None, tracing: Trace | None) -> tuple[int, bool]:
    """Run the steps of all epochs after the engine's ``num_steps``.

    Returns:
        The number of steps so far, and whether an interrupt stopped the run.
    """
    done, total = engine.num_steps, _total(config, task)
    if done and _validates(config, done, total):  # the earlier run may have ended before this
        log.write("valid", step=done, **task.evaluate(engine, show_progress))
    meter = _Meter(engine)
    # The first line of a resumed run may cover fewer steps than the others.
    since = {"since": done} if done % config.log_every else {}
    first, start = divmod(done, max(task.steps_per_epoch, 1))
    batches = itertools.chain.from_iterable(
        task.epoch(k, start if k == first else 0) for k in range(first, config.epochs))
    left = itertools.islice(batches, max(total - done, 0))
    with Interrupt() as interrupt, progress_bar(total, "training", show_progress, done) as bar:
        for step, (batch, num_samples) in enumerate(left, done + 1):
            task.before_step(engine, step - 1, total)
            loss, _ = engine.step(batch)
            done = step
            if tracing and step == config.traced[1]:
                _write(tracing)
            meter.add(loss, num_samples)
            bar.update()
            if step % config.log_every == 0 or step == total:
                line, stop = meter.read(interrupt.requested)
                log.write("train", step=step, **since, **line)
                since = {}
                bar.set_postfix(loss=f"{line['loss']:.4f}")
                if stop:
                    if checkpoints:
                        checkpoints.after(step, True)
                    return done, True
            if checkpoints:
                with meter.paused():
                    checkpoints.after(step)
            if _validates(config, step, total):
                with meter.validation():
                    log.write("valid", step=step, **task.evaluate(engine, show_progress))
    return done, False


def _validates(config: TrainConfig, step: int, total: int) -> bool:
    """Whether the model is validated after `step`, before the end of the run."""
    return config.eval_every > 0 and step % config.eval_every == 0 and step < total


def _total(config: TrainConfig, task: Task) -> int:
    """Return the run's number of steps; raises InvalidInputError if the trace begins later."""
    total = config.epochs * task.steps_per_epoch
    total = min(total, config.max_steps or total)
    if config.trace and config.traced[0] > total:
        raise InvalidInputError("cannot trace training steps", "trace_steps",
                                "-".join(map(str, config.traced)), f"steps of the run, 1-{total}",
                                "choose earlier steps, or train longer")
    return total


def _traced(engine: Engine, config: TrainConfig, done: int) -> Trace | None:
    """Return the trace of the configured steps; None if none of the remaining steps is traced."""
    if not config.trace:
        return None
    import oper

    first, last = config.traced
    if last <= done:
        warnings.warn(fail("no step is traced", "trace_steps", f"{first}-{last}",
                           f"steps after {done}, at which this run resumes",
                           "choose later steps"), stacklevel=2)
        return None
    return oper.trace(engine.bare, config.trace, (max(first, done + 1), last), done=done)


def _write(tracing: Trace) -> None:
    """Write a trace unless it has been written; a system error is a warning. Collective."""
    try:
        tracing.write()
    except OperError:  # DeadlineError is a subclass of OSError
        raise
    except OSError as error:
        warnings.warn(f"the trace is not written: {error}", stacklevel=2)


class _Meter:
    """Measures loss, speed, phase times and counts of keys over all ranks since the last `read`,
    excluding checkpoints and validations."""

    def __init__(self, engine: Engine) -> None:
        self._tables = [t for t in tables_of(engine.bare)
                        if isinstance(t, ShardedTables) and not t.on_device]
        self._keys = KeyMeter(engine.bare)
        self.restart()

    def restart(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)  # loss * samples, samples, interrupts
        self._phases = torch.zeros_like(take_phases(self._tables))
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time and the phases of the block out of the next `read`."""
        self._phases += take_phases(self._tables)
        began = time.perf_counter()
        yield
        take_phases(self._tables)
        self._began += time.perf_counter() - began

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """`paused`, for lookups that are not of training batches."""
        with self.paused(), self._keys.paused():
            yield

    def add(self, loss: torch.Tensor, num_samples: int) -> None:
        self._sums[0] += float(loss) * num_samples
        self._sums[1] += num_samples

    def read(self, interrupted: bool) -> tuple[dict[str, Any], bool]:
        """Return the values of a metrics line, and whether any rank was interrupted. Collective."""
        self._sums[2] = float(interrupted)
        phases = self._phases + take_phases(self._tables)
        sums = sum_over_ranks(torch.cat([self._sums, phases, self._keys.take()]))
        loss, samples, interrupts = sums[:3].tolist()
        seconds = time.perf_counter() - self._began
        self.restart()
        line = {"loss": loss / max(samples, 1), "samples_per_s": samples / seconds}
        _, of_phases, of_keys = sums.split([3, phases.numel(), sums.numel() - 3 - phases.numel()])
        tables = {"phases": by_phase(of_phases), "keys": self._keys.by_table(of_keys)}
        return {**line, **{name: values for name, values in tables.items() if values}}, (
            interrupts > 0)


class Interrupt:
    """Records Ctrl-C and SIGTERM in `requested`; another signal more than a second later raises
    KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        with contextlib.suppress(ValueError):  # not the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._at > _SECOND_CTRL_C_S:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._at = True, now
            print("oper: stopping at the next log line and saving the state; interrupt again to "
                  "stop immediately without saving", file=sys.stderr)


def defined(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace undefined metrics by None, since JSON has neither NaN nor infinity."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()}


class _MetricsFile:
    """Writes ``metrics.jsonl`` and ``config.json`` to `folder`; does nothing if it is None."""

    def __init__(self, folder: Path | None, echo: Mapping[str, Any], more: bool = False) -> None:
        self._folder, self._echo, self._more = folder, echo, more
        self._file: IO[str] | None = None

    def __enter__(self) -> _MetricsFile:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_text(self._folder / CONFIG, json.dumps(self._echo, indent=1) + "\n")
            self._file = open(self._folder / METRICS, "a" if self._more else "w",
                              encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with errors_name(self._file.name):
                self._file.close()

    def write(self, event: str, **values: Any) -> None:
        if self._file is not None:
            line = {"event": event, "time": time.time(), **defined(values)}
            with errors_name(self._file.name):
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()


@contextlib.contextmanager
def _peer_errors(engine: Engine) -> Iterator[None]:
    """Convert gloo's errors about a lost peer to PeerLostError."""
    try:
        yield
    except OperError:
        raise
    except RuntimeError as error:
        text = str(error).strip().partition("\n")[0]
        signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo")
        if ranks()[1] == 1 or not any(sign in str(error) for sign in signs):
            raise
        from oper.integration.torchrec_modules import ShardedEmbeddingBags

        for module in engine.bare.modules():
            if isinstance(module, ShardedEmbeddingBags):
                module.tables.barrier()  # detects exited peers: raises an error with the rank
        raise PeerLostError(
            f"rank {ranks()[0]} of {ranks()[1]} has lost a peer in an exchange over gloo", "cause",
            text, "all ranks alive", "check the other ranks' logs") from error
