"""``python -m tests.fuzz FORMAT``: coverage-guided fuzzing of a file format (needs atheris).

Unknown arguments are passed to libFuzzer, e.g. ``-max_total_time=600``.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["oper", "zipfile", "tomllib", "json.decoder"],
                                enable_loader_override=False):
    from tests.fuzz import targets


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("format", choices=sorted(targets.TARGETS))
    parser.add_argument("--corpus", help="folder that is kept and grows")
    args, rest = parser.parse_known_args()
    warnings.simplefilter("ignore")
    own = None if args.corpus else tempfile.mkdtemp(prefix="fuzz-corpus-")
    corpus = Path(args.corpus or own)
    corpus.mkdir(parents=True, exist_ok=True)
    for k, data in enumerate(targets.seeds(args.format)):
        (corpus / f"seed{k}").write_bytes(data)
    # libFuzzer ends its process without cleaning up; this process then removes the files.
    child = os.fork()
    if child:
        status = 1
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # the fuzzer's own, which then ends
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                break
        targets.remove_files()
        if own:
            shutil.rmtree(own, ignore_errors=True)
        return abs(status)

    def run(data: bytes) -> None:
        targets.one(args.format, data)

    atheris.Setup([sys.argv[0], "-rss_limit_mb=3000", "-timeout=20", "-max_len=4096", *rest,
                   str(corpus)], run)
    atheris.Fuzz()  # ends the process
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
