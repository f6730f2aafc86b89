"""Damaged files of torch.save, which torch loads, are refused."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

import oper
from oper.errors import FileFormatError
from oper.integration.checkpoint.files import CHECKSUMS, check_archive
from tests.support import damage_record


def test_every_flipped_bit_inside_a_record_is_found() -> None:
    """torch itself loads most of these files without an error."""
    data = io.BytesIO()
    torch.save({"weight": torch.arange(40.0), "steps": 3}, data)
    whole = data.getvalue()
    check_archive(io.BytesIO(whole), "cannot read it")
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        records = [(r.filename, archive.read(r)) for r in archive.infolist()]
    tried = loaded = 0
    for name, content in records:
        begin = whole.index(content, whole.index(name.encode()))
        for at in range(begin, begin + len(content), 4):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            with pytest.raises(FileFormatError, match=r"cannot read it: CRC-32 of record="):
                check_archive(io.BytesIO(damaged), "cannot read it")
            tried += 1
            try:
                torch.load(io.BytesIO(damaged), weights_only=True)
                loaded += 1
            except Exception:  # torch raises whatever the bytes mean
                continue
    assert tried > 80 and loaded > 40


@pytest.mark.parametrize("size", [0, 30, 200, -1, -40])
def test_a_truncated_archive_is_refused(size: int) -> None:
    data = io.BytesIO()
    torch.save({"weight": torch.arange(40.0)}, data)
    with pytest.raises(FileFormatError, match="damaged or of another kind"):
        check_archive(io.BytesIO(data.getvalue()[:size]), "cannot read it")


def test_an_archive_without_checksums_is_refused() -> None:
    data = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.arange(40.0)}, data)
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(FileFormatError, match=r"set_crc32_options\(True\)"):
        check_archive(data, "cannot read it")


@pytest.mark.parametrize("chunk_bytes", [256, 64 << 20])
def test_a_checkpoint_without_a_checksum_file_is_verified(chunk_bytes: int, tmp_path: Path) -> None:
    """Checkpoints that torch wrote without OPER, in which every value is an archive."""
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(64, 8), torch.nn.Linear(8, 1))
    rows = model[0].weight.detach().clone()
    oper.shard(model, plan=None, optimizer=oper.SGD())
    oper.save_checkpoint(tmp_path / "c", model, chunk_bytes=chunk_bytes)
    (tmp_path / "c" / CHECKSUMS).unlink()
    oper.load_checkpoint(tmp_path / "c", model)
    file = next((tmp_path / "c").glob("*.distcp"))
    damage_record(file, rows[:8].numpy().tobytes())
    with pytest.raises(FileFormatError, match=r"distcp: CRC-32 of record"):
        oper.load_checkpoint(tmp_path / "c", model)
    assert torch.equal(model.state_dict()["0.weight"], rows), "the tables are untouched"
