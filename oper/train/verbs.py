"""``oper train``: train a model on a preprocessed folder, alone or under torchrun."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from oper.errors import UsageError

_FLAGS = {  # flag: (value, help); each flag overrides the key of the same name
    "data": ("DIR", "folder that 'oper preprocess' wrote"),
    "out": ("DIR", "folder for metrics, configuration and the trained state"),
    "sharding": ("KIND", "oper, none (one process, unsharded) or torchrec"),
    "stats": ("FILE", "access statistics, for sharding = \"oper\""),
    "plan": ("FILE", "plan file, for sharding = \"oper\""),
    "topology": ("FILE", "topology file, for sharding = \"oper\""),
    "seed": ("N", "seed of the initial weights and the order of the rows"),
    "batch_size": ("N", "samples per rank and step"),
    "epochs": ("N", "passes over the training split"),
    "max_steps": ("N", "stop after this many steps"),
    "trace": ("FILE", "write a trace of some steps of all ranks, for ui.perfetto.dev"),
    "trace_steps": ("A-B", "first and last traced step, A-B (default 11-20)"),
}


def configure_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="TOML file; flags override it")
    for key, (value, about) in _FLAGS.items():
        parser.add_argument(f"--{key.replace('_', '-')}", dest=key, metavar=value, help=about)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
                        help="set any other key, e.g. --set model.dim=64; repeat it for more keys")
    parser.add_argument("--force", action="store_true", help="overwrite an earlier run in --out")
    parser.add_argument("--resume", action="store_true",
                        help="continue from the run's last checkpoint (checkpoint_every), if "
                             "there is one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.epilog = ("Ctrl-C saves the state trained so far and, if checkpoint_every is set, a "
                     "checkpoint. For two processes: "
                     "torchrun --nproc-per-node 2 --max-restarts 3 -m oper train CONFIG")


def run_train(args: argparse.Namespace) -> int:
    """Run ``oper train``; return the exit code, 130 after an interrupt, or raise OperError."""
    from oper.train.config import load_config, parse_settings

    flags: dict[str, Any] = {k: getattr(args, k) for k in _FLAGS if getattr(args, k) is not None}
    # Importing TorchRec logs a warning that does not concern the user.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    settings = parse_settings(args.settings)
    if twice := sorted(flags.keys() & settings.keys()):
        raise UsageError("cannot train", "--set", twice, "keys that no other option sets",
                         "set each key once")
    config = load_config(args.config, flags | settings)
    from oper.train.resume import continues

    restart = continues(config.out)
    with _run_folder(config.out, args.force or restart, args.resume), _process_group():
        from oper.train.loop import defined, train
        from oper.train.model import ranks

        result = train(config, resume=args.resume or restart)
        if ranks()[0] == 0:
            print(json.dumps(defined(result)) if args.json else _text(result))
    return 130 if result["interrupted"] else 0


@contextlib.contextmanager
def _run_folder(out: str, force: bool, resume: bool) -> Iterator[None]:
    """Lock the folder `out` inside the block, so that no other run writes to it.

    Only rank 0 locks it and checks for an earlier run, since it may write files before other ranks
    check.

    Raises:
        InvalidInputError: `out` is not a folder, another run uses it, or it has an earlier run and
            neither `force` (overwrite it) nor `resume` (continue it) applies.
    """
    from oper.errors import InvalidInputError
    from oper.support.locks import locked
    from oper.train.loop import METRICS
    from oper.train.resume import EARLIER, STATE, has_checkpoint, is_restart

    what = "cannot start training"
    if os.path.exists(out) and not os.path.isdir(out):
        raise InvalidInputError(what, "out", out, "a folder", "choose another path")
    if int(os.environ.get("RANK", "0")) > 0:
        yield
        return
    with locked(out, what):
        if not is_restart():
            Path(out, EARLIER).unlink(missing_ok=True)
            has_run = has_checkpoint(out) or any(
                os.path.exists(f"{out}/{name}") for name in (STATE, METRICS))
            may_restart = "TORCHELASTIC_RESTART_COUNT" in os.environ
            if may_restart and has_run and not (resume and has_checkpoint(out)):
                Path(out, EARLIER).touch()
        if resume and not force and os.path.exists(f"{out}/{STATE}") and not has_checkpoint(out):
            raise InvalidInputError("cannot resume", "out", out, "a folder with a checkpoint",
                                    "this run has ended without one: replace it with --force, or "
                                    "choose another folder")
        if not (force or resume) and (os.path.exists(f"{out}/{METRICS}") or has_checkpoint(out)):
            raise InvalidInputError(what, "out", out, "a folder without a run",
                                    "resume the run with --resume, replace it with --force, or "
                                    "choose another folder")
        yield


def _text(result: dict[str, Any]) -> str:
    lines = [f"steps: {result['steps']:,}" + (" (interrupted)" if result["interrupted"] else "")]
    if "ndcg@10" in result:
        lines.append(f"validation: nDCG@10 {result['ndcg@10']:.5f}, recall@10 "
                     f"{result['recall@10']:.5f} over {result['users']:,} users")
    elif not result["interrupted"]:
        lines.append(f"validation: AUC {result['auc']:.5f}, log loss {result['log_loss']:.5f} over "
                     f"{result['samples']:,} samples")
    if "trace" in result:
        lines.append(f"trace: {result['trace']}")
    return "\n".join([*lines, f"written: {result['state']}"])


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Create the default process group for the block if torchrun's environment variables are set.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from oper.shmem.settings import deadline_s

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # gloo's default timeout is too long for stalled ranks.
        timeout = timedelta(seconds=max(60.0, deadline_s()))
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        # torchrun's static rendezvous reuses its store after restarts, where a rank could find the
        # address of an exited peer. Hence a prefix per attempt.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size,
                                timeout=timeout)
    yield
    if dist.is_initialized():
        # Avoids a deadlock: gloo's threads need the interpreter lock to release the last
        # collective, but the destructor holds the lock while it waits for these threads.
        dist.monitored_barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
