"""Framed tensors are what ``torch.load`` and ``zipfile`` expect, at every place of a file."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdp_offload.checkpoint.archive import ALIGNMENT_BYTES, Frame, combine_crc

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
SHAPES = ((), (0,), (1,), (3,), (0, 5), (4, 0, 2), (4, 5, 6), (1, 1, 1, 7))
OFFSETS = (0, 13, 5 << 30)


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, bytes]:
    """A tensor and its bytes; of every dtype but bool, any bytes are values."""
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape), data.numpy().tobytes()


def framed(frame: Frame, data: bytes) -> bytes:
    crc = zlib.crc32(data)
    return frame.before(crc) + data + frame.after(crc)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_and_zipfile_read_a_framed_tensor(dtype: torch.dtype, offset: int) -> None:
    for shape in SHAPES:
        tensor, data = some(dtype, shape)
        frame = Frame(dtype, shape, offset)
        found = framed(frame, data)
        assert len(found) == frame.nbytes
        assert frame.data_nbytes == len(data)
        read = torch.load(io.BytesIO(found), weights_only=True)
        assert (read.dtype, read.shape) == (dtype, tensor.shape)
        assert read.stride() == tensor.stride()
        assert bytes_of(read) == data
        with zipfile.ZipFile(io.BytesIO(found)) as archive:
            assert archive.testzip() is None
            assert archive.read("archive/data/0") == data


@given(
    offset=st.integers(0, 1 << 45),
    shape=st.lists(st.integers(0, 1 << 19), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
)
def test_elements_are_aligned_wherever_the_archive_begins(
    offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    frame = Frame(dtype, shape, offset)
    assert frame.data_offset % ALIGNMENT_BYTES == 0
    assert frame.data_offset == offset + len(frame.before(12345))
    whole = len(frame.before(0)) + frame.data_nbytes + len(frame.after(0xFFFFFFFF))
    assert frame.nbytes == whole


def test_the_checksum_of_an_archive_covers_its_elements() -> None:
    frame = Frame(torch.int32, (9,), 0)
    _, data = some(torch.int32, (9,))
    found = bytearray(framed(frame, data))
    found[frame.data_offset + 5] ^= 1
    with zipfile.ZipFile(io.BytesIO(bytes(found))) as archive:
        assert archive.testzip() == "archive/data/0"


def test_a_frame_says_nothing_of_the_time_or_the_process() -> None:
    first = framed(Frame(torch.float32, (3, 5), 7), b"\1" * 60)
    again = framed(Frame(torch.float32, (3, 5), 7), b"\1" * 60)
    assert first == again
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_elements_behind_4_gib_are_addressed(tmp_path: Path) -> None:
    """A sparse file: the central directory stands behind 2^32 bytes, and only it is read."""
    frame = Frame(torch.uint8, ((4 << 30) + 11,), 0)
    with sparse(tmp_path / "large", frame).open("rb") as file, zipfile.ZipFile(file) as archive:
        info = archive.getinfo("archive/data/0")
    assert info.file_size == info.compress_size == (4 << 30) + 11


def test_an_element_behind_4_gib_is_read_by_torch(tmp_path: Path) -> None:
    frame = Frame(torch.uint8, ((4 << 30) + 11,), 0)
    read = torch.load(sparse(tmp_path / "large", frame), mmap=True, weights_only=True)
    assert read.shape == ((4 << 30) + 11,)
    assert read[-1] == 7
    assert read[4 << 30] == 0


@pytest.mark.long
def test_a_sparse_archive_behind_4_gib_has_its_checksum(tmp_path: Path) -> None:
    frame = Frame(torch.uint8, ((4 << 30) + 11,), 0)
    zeros = zlib.crc32(b"\0" * (1 << 20))
    crc = 0
    for _ in range(4 << 10):
        crc = combine_crc(crc, zeros, 1 << 20)
    crc = combine_crc(crc, zlib.crc32(b"\0" * 10 + b"\7"), 11)
    path = sparse(tmp_path / "large", frame, crc)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def sparse(path: Path, frame: Frame, crc: int = 0) -> Path:
    """Zeros, then a 7, framed; takes no space on the disk."""
    with path.open("wb") as file:
        file.truncate(frame.nbytes)
        file.write(frame.before(crc))
        file.seek(frame.data_offset + frame.data_nbytes - 1)
        file.write(b"\7" + frame.after(crc))
    return path


@given(first=st.binary(max_size=400), second=st.binary(max_size=4000))
def test_checksums_combine(first: bytes, second: bytes) -> None:
    found = combine_crc(zlib.crc32(first), zlib.crc32(second), len(second))
    assert found == zlib.crc32(first + second)


@given(st.lists(st.binary(max_size=99), max_size=9))
def test_checksums_of_many_blocks_combine_in_any_grouping(blocks: list[bytes]) -> None:
    left = 0
    for block in blocks:
        left = combine_crc(left, zlib.crc32(block), len(block))
    right, nbytes = 0, 0
    for block in reversed(blocks):
        right = combine_crc(zlib.crc32(block), right, nbytes)
        nbytes += len(block)
    assert left == right == zlib.crc32(b"".join(blocks))


@pytest.mark.parametrize("nbytes", [1, 255, (8 << 20) - 1, 8 << 20])
def test_checksums_of_blocks_of_the_real_size_combine(nbytes: int) -> None:
    first, second = os.urandom(999), bytes(nbytes)
    found = combine_crc(zlib.crc32(first), zlib.crc32(second), nbytes)
    assert found == zlib.crc32(second, zlib.crc32(first))
