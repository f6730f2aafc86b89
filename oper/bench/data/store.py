"""The case ``store`` of ``oper bench data``: preprocessing from and into an S3-compatible store."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyarrow import fs

from oper.bench.core.child import Child
from oper.bench.core.record import elapsed
from oper.bench.data.cases import log_file
from oper.data import PreprocessOptions, load_recipe, preprocess
from oper.data.reading.store import filesystem, upload
from oper.errors import needs

BUCKET = "oper-bench"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3-compatible server (moto) on this machine.

    Yields the URL of a bucket, with ``{}`` in place of the key.

    Raises:
        MissingDependencyError: moto is not installed.
        OperError: the server does not start.
    """
    with needs("cannot start a store", "oper[bench]"):
        import moto.server  # noqa: F401
    settings = {"AWS_ACCESS_KEY_ID": "oper", "AWS_SECRET_ACCESS_KEY": "oper",
                "AWS_EC2_METADATA_DISABLED": "true", "no_proxy": "127.0.0.1"}
    before = dict(os.environ)
    server = Child(_serve, (), "the store")
    try:
        os.environ.update(settings)
        address = f"scheme=http&endpoint_override=127.0.0.1%3A{server.wait()}&region=us-east-1"
        made, path, _ = filesystem(f"s3://{BUCKET}?{address}&allow_bucket_creation=true")
        made.create_dir(path)
        yield f"s3://{BUCKET}/{{}}?{address}"
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.close(0)


def _serve(pipe: Any) -> None:
    """Run the server in this process; sends its port and stops when the pipe is closed."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    pipe.send(server.get_host_and_port()[1])
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.recv()


def store(num_rows: int, folder: Path) -> dict[str, Any]:
    """Preprocess a log in a local folder, and again in a bucket of an S3-compatible server.

    ``verified``: the Parquet files of both outputs are equal byte by byte. ``ratio_time``: time
    with the bucket / time with the folder; the bucket's server shares this machine's cores.
    """
    (folder / "log").mkdir()
    log = Path(shutil.copy(log_file(folder, num_rows), folder / "log" / "log.txt"))
    recipe, options = load_recipe("criteo-kaggle"), PreprocessOptions()
    local_s = elapsed(lambda: preprocess(recipe, [str(log)], folder / "local", options))
    with s3_server() as url:
        upload(log.parent, url.format("log"), [])
        store_s = elapsed(lambda: preprocess(recipe, [url.format("log/log.txt")],
                                             url.format("out"), options))
        found, path, _ = filesystem(url.format("out"))
        fs.copy_files(path, str(folder / "back"), source_filesystem=found,
                      destination_filesystem=fs.LocalFileSystem(), use_threads=False)
    names = [sorted(str(p.relative_to(folder / d)) for p in (folder / d).rglob("*.parquet"))
             for d in ("local", "back")]
    same = bool(names[0]) and names[0] == names[1] and all(
        (folder / "local" / n).read_bytes() == (folder / "back" / n).read_bytes()
        for n in names[0])
    same &= (folder / "back" / "manifest.json").is_file()
    num_bytes = sum((folder / "local" / n).stat().st_size for n in names[0])
    return {"verified": same, "rows": num_rows, "files": len(names[0]), "bytes": num_bytes,
            "local_s": local_s, "store_s": store_s, "ratio_time": store_s / local_s}
