"""Excel workbooks, as CSV."""

from __future__ import annotations

import csv
import io
import itertools
import zipfile

from oper.errors import FileFormatError, InvalidInputError, MissingDependencyError, fail

_ROWS = 10_000  # that are written at a time


class Sheet:
    """The first sheet of a workbook as CSV, read through once; times as ISO 8601."""

    def __init__(self, path: str) -> None:
        """Open the file `path`.

        Raises:
            MissingDependencyError: openpyxl is not installed.
            InvalidInputError: there is no such file.
            FileFormatError: it is no workbook.
        """
        what = f"cannot read {path!r}"
        try:
            import openpyxl  # type: ignore[import-untyped]
        except ImportError:
            raise MissingDependencyError(
                fail(what, "openpyxl", None, "installed",
                     "pip install 'oper[data]', or save the sheet as CSV")) from None
        try:
            book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        except FileNotFoundError:
            raise InvalidInputError(fail("cannot read the log", "input", path, "an existing file",
                                         "check the path")) from None
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise FileFormatError(fail(what, "content", str(error)[:200], "an Excel workbook",
                                       "fetch it again")) from None
        self._rows = book.worksheets[0].iter_rows(values_only=True)

    def read(self, _: int) -> bytes:
        """The next rows; nothing at the end."""
        out = io.StringIO(newline="")
        csv.writer(out, lineterminator="\n").writerows(itertools.islice(self._rows, _ROWS))
        return out.getvalue().encode()
