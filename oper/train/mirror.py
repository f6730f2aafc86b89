"""A local copy of the weights of a training run in a store, kept up to date for a server."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Self, TypeAlias

from oper.data.reading import store
from oper.errors import FileFormatError, InvalidInputError, fail
from oper.integration.checkpoint.delta_files import base_of, folder_of
from oper.integration.checkpoint.files import CHECKSUMS, METADATA, check_files, has_all_files
from oper.support.files import atomic_write
from oper.train.resume import CHECKPOINT, CONFIG, STATE

_log = logging.getLogger(__name__)
INTERVAL_S = 0.25  # between two listings of the store
Stamps: TypeAlias = dict[str, tuple[int, int]]  # size in bytes and modification time by name


class _ReplacedError(Exception):
    """A file has changed while it was copied, or was not copied to its end."""


class RunMirror:
    """Copies new weights of a run from a URL to a temporary folder, in a separate thread.

    In the folder, every file is complete, and the files of a checkpoint are of one checkpoint: it
    is put in place when all of them are there and match its checksums. In the store, files
    may therefore appear in any order, if each appears as a whole. Of deltas, only those of the
    checkpoint in place are copied.

    Args:
        url: the folder of the run in a store that `oper.data.reading.store` can open.

    Attributes:
        folder: the local folder, until `close`.

    Raises:
        InvalidInputError: the store cannot be opened or listed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._files: Stamps = {}  # the files copied: those in the folder itself, and deltas
        self._deltas: Stamps = {}
        self._arrived: Stamps = {}  # files copied so far, of a checkpoint that is being copied
        self._seen: Stamps = {}  # files of the checkpoint in place, or of a refused one
        self._sums, self._is_refused = b"", False
        self._logged = ""  # the last logged problem with the store
        self._stop = threading.Event()
        self._temporary = tempfile.TemporaryDirectory(prefix="oper-follow-")
        self.folder = Path(self._temporary.name)
        self._incoming = self.folder / f"{CHECKPOINT}.incoming"
        self._thread = threading.Thread(target=self._run, name="oper-mirror", daemon=True)
        try:
            self._log_once(self.update())
        except BaseException:
            self._temporary.cleanup()
            raise

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and remove the folder."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._temporary.cleanup()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self._log_once(self.update())
            except Exception as error:  # stores raise any class; a retry may succeed
                self._log_once(str(error) or type(error).__name__)

    def _log_once(self, text: str) -> None:
        if text and text != self._logged:
            _log.warning("%s", text)
        self._logged = text

    def update(self) -> str:
        """Copy new files from the store; return why a new checkpoint or delta is not served, or "".

        Raises:
            Exception: the store or the disk failed; the next call tries again.
        """
        found = store.listing(self._url)
        for name in (CONFIG, STATE):
            if name in found:
                self._copy(name, found[name], self.folder / name, self._files)
            elif self._files.pop(name, None):
                (self.folder / name).unlink()
        refused = self._update_checkpoint({name: stamp for name, stamp in found.items()
                                           if name.startswith(f"{CHECKPOINT}/")})
        place = self.folder / CHECKPOINT
        if not place.exists():
            return refused
        return refused or self._update_deltas(f"{CHECKPOINT}.deltas/{base_of(place)}/", found)

    def _update_deltas(self, folder: str, found: Stamps) -> str:
        """Copy deltas up to the first missing one: a server regards a gap as the end of a chain,
        but here the missing delta may still arrive. Return which one is missing, or ""."""
        # A resumed run may have removed an incomplete delta, whose parts must not be mixed with
        # those of the next one of this number. The last first, so that there is never a gap.
        for name in sorted(self._deltas.keys() - found.keys(), reverse=True):
            (self.folder / name).unlink()
            del self._deltas[name]
        parts = sorted(n for n in found if n.startswith(folder))
        numbers = sorted({n.removeprefix(folder).partition("/")[0] for n in parts})
        last = numbers[-1] if numbers else ""
        missing = next((n for k in range(len(numbers)) if (n := f"{k:06d}") not in numbers), "")
        for name in parts:
            if missing and name >= f"{folder}{missing}":
                break
            if not self._stop.is_set():
                self._copy(name, found[name], self.folder / name, self._deltas)
        return missing and fail("no later step is served yet", "missing delta", missing,
                                f"all deltas up to {last} in {store.full_name(self._url)!r}",
                                "upload it, or save a full checkpoint")

    def _copy(self, name: str, stamp: tuple[int, int], to: Path, have: Stamps) -> None:
        """Copy a file of the store unless it is in `have`, and add it there. A file that changes or
        disappears meanwhile is left for the next call."""
        if have.get(name) == stamp or ".." in name.split("/"):
            return
        url = store.inside(self._url, name)
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_write(to) as out, store.open_input(url) as file:
                while (piece := file.read(1 << 22)) and not self._stop.is_set():
                    out.write(piece)
                if out.tell() != stamp[0] or store.stamp(url) != stamp:
                    raise _ReplacedError
        except _ReplacedError:
            return
        except InvalidInputError:
            if name in store.listing(self._url):
                raise
            return
        if stamp[1]:  # the newest of the weights is served
            os.utime(to, ns=(stamp[1], stamp[1]))
        have[name] = stamp

    def _update_checkpoint(self, found: Stamps) -> str:
        """Move the store's checkpoint, whose files are `found`, to its place if it is new and
        complete. Return why it is refused, or ""."""
        if f"{CHECKPOINT}/{METADATA}" not in found or self._is_seen(found):
            return ""
        for name in self._arrived.keys() - found.keys():
            (self._incoming / name.rpartition("/")[2]).unlink()
            del self._arrived[name]
        for name, stamp in found.items():
            if self._stop.is_set():
                return ""
            self._copy(name, stamp, self._incoming / name.rpartition("/")[2], self._arrived)
        if self._arrived != found or not has_all_files(self._incoming):
            return ""  # still being written
        self._seen, self._is_refused = found, True
        self._sums = (self._incoming / CHECKSUMS).read_bytes()
        try:
            check_files(self._incoming)
        except FileFormatError as error:  # damaged, or of two checkpoints while one is replaced
            if not _has_fine_times(found):
                self._arrived = {}
            return f"the checkpoint in {store.full_name(self._url)!r} is not served yet: {error}"
        self._is_refused = False
        place = self.folder / CHECKPOINT
        olds = [p for p in (place, folder_of(place)) if p.exists()]
        for old in olds:  # in one step, since a server may be reading it
            old.rename(old.with_name(f"{old.name}.previous"))
        self._incoming.rename(place)
        for old in olds:
            shutil.rmtree(old.with_name(f"{old.name}.previous"))
        self._arrived, self._deltas = {}, {}
        return ""

    def _is_seen(self, found: Stamps) -> bool:
        """Whether the checkpoint with these files is in place, or was refused."""
        if found != self._seen or (self._is_refused and 0 in {time for _, time in found.values()}):
            return False
        if _has_fine_times(found):
            return True
        with store.open_input(store.inside(self._url, f"{CHECKPOINT}/{CHECKSUMS}")) as file:
            return file.read() == self._sums


def _has_fine_times(found: Stamps) -> bool:
    """Whether files with equal stamps are equal. With times in whole seconds, or none, a file that
    has replaced another one may have its stamp."""
    return any(time % 10**9 for _, time in found.values())
