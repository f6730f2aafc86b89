"""Convert Excel workbooks to CSV."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator

from oper.errors import FileFormatError, InvalidInputError, needs


def rows_as_csv(path: str) -> Iterator[bytes]:
    """Yield the rows of a workbook's first sheet as lines of CSV; times become ISO 8601.

    Raises:
        MissingDependencyError: openpyxl is not installed.
        InvalidInputError: the file does not exist.
        FileFormatError: the file is not a workbook, or damaged.
    """
    what = f"cannot read {path!r}"
    with needs(f"{what}, which may be saved as CSV instead", "oper[data]"):
        import openpyxl  # type: ignore[import-untyped]
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    except FileNotFoundError:
        raise InvalidInputError("cannot read the log", "input", path, "an existing file",
                                "check the path") from None
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise FileFormatError(what, "content", str(error)[:200], "an Excel workbook",
                              "fetch it again") from None
    sheet, width = book.worksheets[0], 0
    sheet.reset_dimensions()  # some programs state none, or only the first cell
    for row in sheet.iter_rows(values_only=True):
        width = width or len(row)
        out = io.StringIO(newline="")
        # A row ends at its last cell, and empty ones need not be in the file.
        csv.writer(out, lineterminator="\n").writerow([*row, *[None] * (width - len(row))])
        yield out.getvalue().encode()
