"""The fuzz targets: one function per format, which takes any bytes and may only raise OperError."""

import atexit
import functools
import io
import json
import os
import random
import shutil
import socket
import struct
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from oper.analysis.value_counts import stats_from_value_counts
from oper.data import Loader, LoaderOptions, PreprocessOptions, preprocess
from oper.data.folder import Folder
from oper.data.generate.generator import load_workload
from oper.data.generic import Choice, generic_recipe
from oper.data.reading.lines import Unit
from oper.data.reading.readers import read_unit
from oper.data.recipe import load_recipe
from oper.errors import OperError
from oper.integration.checkpoint.delta_files import put_rows, read_part, write_part
from oper.integration.checkpoint.files import CHECKSUMS, METADATA, CheckpointReader, check_files
from oper.integration.checkpoint.weights import Weights
from oper.plan import Plan, uniform_plan
from oper.search.problem.constraints import parse_constraints
from oper.search.verbs import read_constraints
from oper.serve import wire as serve_wire
from oper.shmem.group.connections import rank_of
from oper.shmem.group.desync import CollectivePhase
from oper.shmem.group.groups import ThreadGroup
from oper.shmem.group.liveness import LivenessMonitor
from oper.shmem.keys.directories import Keys
from oper.shmem.keys.rules import DynamicTable
from oper.shmem.optim.optimizers import RowWiseAdagrad
from oper.shmem.tables import ShardedTables
from oper.stats import AccessStats
from oper.support.files import read_arrays, write_arrays
from oper.tables import TableSpec
from oper.topology import Topology
from oper.train.config import load_config
from oper.train.model import load_state
from tests.fuzz import values
from tests.fuzz.exchange import peer
from tests.serve_support import SIGNATURE, random_request

# On a file system in memory if there is one, since millions of files are written.
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
_places: list[Path] = []


def place(given: Path | None = None) -> Path:
    """Return the folder of the files: `given` from now on, or one that the first call creates."""
    if given is not None:
        _places[:] = [given]
    if not _places:
        _places.append(Path(tempfile.mkdtemp(prefix="fuzz-", dir=MEMORY)))
        atexit.register(remove_files)
    return _places[0]


def remove_files() -> None:
    """Remove the folder of the files."""
    for folder in _places:
        shutil.rmtree(folder, ignore_errors=True)
    _places.clear()


def _file(name: str, data: bytes) -> Path:
    path = place() / name
    with open(path, "wb", buffering=0) as file:
        file.write(data)
    return path


def manifest(data: bytes) -> None:
    """Read manifests of preprocessed folders, and what they refer to."""
    folder = Folder.open(_file("manifest.json", data).parent)
    assert len(folder.tables(4)) == len(folder.num_rows)
    assert len(folder.bucket_labels) <= 1 << 15 and folder.ids_in_hotness_order in (True, False)


def text(data: bytes) -> None:
    """Read delimited text; every line is a row, or counted as malformed."""
    for rows in read_unit(Unit(str(_file("log.txt", data)), "tsv"), load_recipe("criteo-kaggle")):
        assert rows.num_lines == rows.rows.size + rows.num_bad


def checkpoint(data: bytes) -> None:
    """Read descriptions of checkpoints."""
    folder = place() / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "__0_0.distcp").write_bytes(b"0" * 10_000)
    (folder / METADATA).write_bytes(data)
    CheckpointReader(str(folder)).read_metadata()


def checksums(data: bytes) -> None:
    """Read checksums of checkpoints."""
    folder = place() / "summed"
    folder.mkdir(exist_ok=True)
    (folder / "__0_0.distcp").write_bytes(b"0" * 100)
    (folder / CHECKSUMS).write_bytes(data)
    check_files(folder)


def delta(data: bytes) -> None:
    """Read parts of delta checkpoints."""
    put_rows(*read_part(_file("rank-00000-00000.npz", data)), {"bags": (_tables(), {"t", "d"})})


@functools.cache
def _tables() -> ShardedTables:
    """Make tables that take a delta's rows and keys."""
    specs = [TableSpec(t, 3, 2, (f,), optimizer="rowwise_adagrad") for t, f in ("tf", "dg")]
    tables = ShardedTables(uniform_plan(specs, 1), [("f", "t"), ("g", "d")],
                           ThreadGroup.create(1)[0], RowWiseAdagrad(lr=0.1))
    tables.keys = Keys(tables, {"d": DynamicTable(admit_after=2)})
    return tables


class _Peers:
    """A `LivenessMonitor` whose connections the fuzzer controls."""

    def __init__(self) -> None:
        self.monitor = LivenessMonitor.__new__(LivenessMonitor)
        self.monitor.count, self.monitor.failure = 1, None
        self.monitor.at, self.monitor.is_inside = CollectivePhase(0, 0), True
        self.monitor._answers, self.monitor.left, self.monitor._is_closed = {}, set(), False
        self.monitor._changed = threading.Condition()
        self.monitor._group = type("Two", (), {"rank": 0, "world_size": 3})()


def wire(data: bytes) -> None:
    """Receive messages on the connections between ranks, and the handshake of a connecting process.
    """
    peers, (here, there) = _Peers(), socket.socketpair()
    with here, there:
        there.sendall(data[:4096])
        there.shutdown(socket.SHUT_WR)
        peers.monitor._peers = {1: here}
        if data[:1] < b"\x80":
            while peers.monitor._receive(1, here):
                pass
            failure = peers.monitor.failure
            assert 1 in peers.monitor.left or isinstance(getattr(failure, "rank", None), int)
        else:
            assert rank_of(here, b"t" * 32, peers.monitor._group) is None, "a stranger was let in"


def parquet(data: bytes) -> None:
    """Read Parquet files of preprocessed folders."""
    folder = place() / "parquet"
    if not folder.exists():
        seeds("parquet")
    with open(folder / "train" / "part-00000.parquet", "wb", buffering=0) as file:
        file.write(data)
    for _ in Loader(folder, "train", LoaderOptions(8, window=0)):
        pass


def exchange(data: bytes) -> None:
    """Receive the messages of a rank in another memory domain, see `tests.fuzz.exchange`."""
    peer().step(data)


def request(data: bytes) -> None:
    """Decode requests to the scoring server: two bytes with the length of the header, then the
    message."""
    serve_wire.decode_request(data[2:], int.from_bytes(data[:2], "little"),
                              SIGNATURE).check(SIGNATURE)


# By format, what reads a file of it.
READERS: dict[str, Callable[[Path], object]] = {
    "arrays": lambda path: read_arrays(path, "oper-test", 3),  # of statistics, sketches, checksums
    "stats": AccessStats.load,
    "plan": Plan.load,
    "topology": Topology.from_toml,
    "recipe": lambda path: load_recipe(str(path)),
    "configuration": lambda path: load_config(path, {"data": "d"}),
    "workload": load_workload,
    "constraints": lambda path: parse_constraints(read_constraints(str(path)), ["a", "b"], 2),
    "weights": lambda path: Weights(path, ["w"]),  # for inference, as `torch.save` writes them
    "value_counts": stats_from_value_counts,
    "trained_state": load_state,
}
_SUFFIXES = {"topology": ".toml", "recipe": ".toml", "configuration": ".toml", "workload": ".toml",
             "constraints": ".json", "weights": ".pt", "value_counts": ".csv",
             "trained_state": ".pt"}


def _read(name: str, data: bytes) -> None:
    READERS[name](_file(name + _SUFFIXES.get(name, ""), data))


TARGETS: dict[str, Callable[[bytes], None]] = {
    **{name: functools.partial(_read, name) for name in READERS},
    **{f.__name__: f for f in (
        manifest, checkpoint, checksums, delta, wire, request, text, parquet, exchange)}}


def one(name: str, data: bytes) -> bool:
    """Run one input; return whether it was accepted.

    Raises every error except OperError, and an OperError for lack of memory: a short input must not
    need much memory.
    """
    try:
        TARGETS[name](data)
    except OperError as error:
        reason: BaseException | None = error
        while reason is not None:
            if isinstance(reason, MemoryError):
                raise reason from None
            reason = reason.__cause__ or reason.__context__
        return False
    return True


def change(good: bytes, rng: random.Random) -> bytes:
    """Change, cut out or double some bytes of a file; half of the archives get new checksums, and
    half of the JSON and TOML texts get other values instead."""
    if rng.random() < 0.5:
        if good.startswith(b"PK"):
            return _change_member(good, rng)
        if (text := values.exchange(good, rng)) is not None:
            return text
    data = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind < 2 and at < len(data):
            data[at] = rng.choice((0, 255, 0x7f, data[at] ^ 1 << rng.randrange(8),
                                   rng.randrange(256)))
        elif kind == 2:
            del data[at:at + rng.randint(1, 20)]
        else:
            data[at:at] = data[at:at + rng.randint(1, 20)]
    return bytes(data)


def _change_member(good: bytes, rng: random.Random) -> bytes:
    victim = rng.choice(zipfile.ZipFile(io.BytesIO(good)).namelist())
    return rewritten(good, lambda name, data: change(data, rng) if name == victim else data)


def rewritten(archive: bytes, member: Callable[[str, bytes], bytes]) -> bytes:
    """Return an archive with the contents of each member replaced by `member(name, contents)`."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as before, zipfile.ZipFile(out, "w") as after:
        for name in before.namelist():
            after.writestr(name, member(name, before.read(name)))
    return out.getvalue()


def seeds(name: str) -> list[bytes]:
    """Return valid files of a format and variants of them, as the initial corpus."""
    from tests.support import mixed_plan

    if name in ("arrays", "checksums"):
        meta: dict[str, Any] = {"files": {"__0_0.distcp": [100, zlib.crc32(b"0" * 100)]}}
        kind = ("oper-test", 3) if name == "arrays" else ("oper-checkpoint", 1)
        data = {"a": np.arange(6, dtype=np.int16).reshape(2, 3)} if name == "arrays" else {}
        write_arrays(place() / "seed", *kind, data, meta)
        return [(place() / "seed").read_bytes()]
    if name == "delta":
        where = {"number": 0, "step": 1, "since": 0, "rank": 0, "world_size": 1, "part": 0}
        seen = np.array([[1, 0], [0, (1 << 32) - 1]], np.uint32)
        arrays = {"0.ids": np.arange(3, dtype=np.uint32), "0.rows": np.ones((3, 2), np.float32),
                  "3.slots": np.arange(1, dtype=np.uint32)}
        for k in "12":
            arrays |= {f"{k}.slots": np.arange(2, dtype=np.uint32), f"{k}.seen": seen,
                       f"{k}.keys": np.array([-7, 0])}
        write_part(place(), where, arrays, {"items": [
            [0, "t", 0, ["rows"]], *([0, "d", 0, [p]] for p in ("keys", "candidates", "expired"))],
            "last": True})
        return [(place() / "rank-00000-00000.npz").read_bytes()]
    if name == "plan":
        return [mixed_plan().to_text().encode()]
    if name == "stats":
        from tests.faults.files import make_stats

        make_stats([3, 20]).save(place() / "seed")
        return [(place() / "seed").read_bytes()]
    if name == "wire":
        return [struct.pack("<4sqq", b"ask?", 0, 0), struct.pack("<4sqq", b"gave", 2, 1),
                struct.pack("<4sqq", b"tell", 5, 0) * 3, b"\xfft" * 20]
    if name == "exchange":
        return [peer().recorded]
    if name == "parquet":
        return _parquet()
    if name == "request":
        return [length.to_bytes(2, "little") + body for body, length in _requests()]
    return _texts(name)


def _parquet() -> list[bytes]:
    """Write a label, a dense column, ids and bags of ids.

    The reader treats all columns of a kind alike, and a file with few columns can be read many
    times as often.
    """
    folder = place() / "parquet"
    shutil.rmtree(folder, ignore_errors=True)
    lines = [f"{k % 2},{k / 7},u{k % 5},{'|'.join(f't{k % n}' for n in range(1, k % 4 + 1))}"
             for k in range(40)]
    (place() / "log.csv").write_text("\n".join(["label,price,user,tags", *lines, ""]))
    recipe = generic_recipe("csv", Choice(["user", "tags:|"], "label", ["price"]))
    preprocess(recipe, [str(place() / "log.csv")], folder,
               PreprocessOptions(valid="0", test="0", min_count=1))
    (file,) = (folder / "train").glob("*.parquet")
    good = file.rename(folder / "train" / "part-00000.parquet").read_bytes()
    # Without checksums of pages, damaged contents also reach the decoder.
    bare = io.BytesIO()
    pq.write_table(pq.ParquetFile(io.BytesIO(good)).read(), bare, write_page_checksum=False)
    return [good, bare.getvalue()]


def _requests() -> list[tuple[bytes, int]]:
    rng = np.random.default_rng(0)
    some, none = random_request(rng, 2), random_request(rng, 0)
    listed = json.dumps({"inputs": [
        {"name": name, "datatype": kind, "shape": list(value.shape), "data": value.tolist()}
        for name, kind, value in (("dense", "FP32", some.dense), ("lengths", "INT32", some.lengths),
                                  ("ids", "INT64", some.ids))]}).encode()
    return [serve_wire.encode_request(some), serve_wire.encode_request(some, ["a", "b", "c"]),
            serve_wire.encode_request(none), (listed, len(listed))]


def _texts(name: str) -> list[bytes]:
    root = Path(__file__).resolve().parents[2]
    if name == "recipe":
        return [p.read_bytes() for p in sorted((root / "datasets").rglob("*.toml"))[:4]]
    if name == "topology":
        return [p.read_bytes() for p in sorted((root / "oper" / "topologies").glob("*.toml"))[:3]]
    if name == "configuration":
        return [b'data = "d"\nbatch_size = 3\n[model]\ndim = 4\ndense_layers = [1, 2]\n']
    if name == "workload":
        return [b'name = "w"\ndays = 2\n[[table]]\nname = "a"\nrows = 100\nexponent = 1.05\n'
                b'shift = 2.0\nheavy = [0.2, 0.1]\nlengths = [0, 2]\nweights = [0.5, 0.5]\n'
                b'drift = 0.1\n[[table]]\nname = "b"\nrows = 7\nlength = 3\ncount = 2\n']
    if name == "constraints":
        return [json.dumps({
            "tables": {"a": {"replicate": [[0, 5]], "modes": ["pull"], "ranks": [0, 1]},
                       "b": {"placements": ["owned"], "memories": ["device"]}},
            "keep_apart": [["a", "b"]], "memory_bytes": ["2GB", 5], "reserve_bytes": 7}).encode()]
    if name == "text":
        line = "\t".join(["1", *["5", ""] * 6, "-3", *["00ff17aa", ""] * 13])
        return [f"{line}\n".encode() * 100]
    if name == "value_counts":
        return [b"field,value,count\n0,a,3\n0,b,4\n1,c,9\n"]
    if name == "manifest":
        _parquet()
        return [(place() / "parquet" / "manifest.json").read_bytes()]
    if name in ("trained_state", "weights"):
        return [_state()]
    return [_description()]


def _state() -> bytes:
    import torch

    from oper.train.model import save_state

    save_state(place() / "seed", {"w": torch.arange(3.0)})
    return (place() / "seed").read_bytes()


def _description() -> bytes:
    import torch
    import torch.distributed.checkpoint as dcp

    folder = place() / "seeds"
    dcp.save({"w": torch.arange(3.0), "n": {"k": 5}}, checkpoint_id=folder, no_dist=True)
    return (folder / METADATA).read_bytes()


def describe(error: BaseException) -> str:
    """Describe a defect in one line."""
    return f"{type(error).__name__}: {error}"
