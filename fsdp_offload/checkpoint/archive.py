"""One tensor as ``torch.save`` writes it, framed so that its bytes can be streamed.

``torch.save`` wants the whole tensor on the CPU. Here the archive (an uncompressed zip file) is
split into what stands before the elements, the elements, and what stands after them: elements may
then come from anywhere, block by block, and their place in the file is known in advance.
``torch.load(..., weights_only=True)`` and ``zipfile`` read the result.

Sources: torch/csrc/jit/serialization and caffe2/serialize/inline_container.h for the record names,
torch/_utils.py for the two rebuild functions, APPNOTE.TXT 6.3 for the zip records.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

ALIGNMENT_BYTES: Final = 64
"""Elements begin at a multiple of this in the file, as in files of ``torch.save``."""

_NAME: Final = "archive/data/0"
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_ZIP64_SIZES = struct.Struct("<2H2Q")
_ZIP64_END = struct.Struct("<4sQ2H2I4Q")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_MAX32: Final = 0xFFFFFFFF
_VERSION: Final = 45  # of zip, the first that knows 64-bit sizes
_DATE: Final = 0x21  # 1980-01-01: the same bytes at every save


@dataclass(frozen=True)
class Frame:
    """An archive for ``data_nbytes`` of elements, without them.

    Args:
        dtype: of the tensor.
        shape: of the tensor; it is stored row-major.
        offset: where the archive begins in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def data_nbytes(self) -> int:
        """Bytes of all elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @functools.cached_property
    def data_offset(self) -> int:
        """Where the elements begin in the file."""
        return self.offset + len(self.before(0))

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the whole archive."""
        return len(self.before(0)) + self.data_nbytes + len(self.after(0))

    def before(self, crc: int) -> bytes:
        """All records up to the elements, whose CRC-32 is ``crc``."""
        small = b"".join(
            header + data for header, _, data in _small_records(self.dtype, self.shape)
        )
        header = self._data_header(crc, padding=0)
        unaligned = self.offset + len(small) + len(header)
        padding = -(unaligned + 4) % ALIGNMENT_BYTES + 4  # an extra field has 4 bytes of its own
        return small + self._data_header(crc, padding)

    def after(self, crc: int) -> bytes:
        """The central directory and the end record."""
        entries, position = b"", 0
        for header, entry, data in _small_records(self.dtype, self.shape):
            entries += _central(*entry, position)
            position += len(header) + len(data)
        sizes = _ZIP64_SIZES.pack(1, 16, self.data_nbytes, self.data_nbytes)
        entries += _central(_NAME, crc, _MAX32, position, sizes)
        start = len(self.before(0)) + self.data_nbytes
        count = len(_small_names()) + 1
        end64 = _ZIP64_END.pack(
            b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, len(entries), start
        )
        locator = _ZIP64_LOCATOR.pack(b"PK\6\7", 0, start + len(entries), 1)
        end = _END.pack(b"PK\5\6", 0, 0, count, count, len(entries), _MAX32, 0)
        return entries + end64 + locator + end

    def _data_header(self, crc: int, padding: int) -> bytes:
        extra = _ZIP64_SIZES.pack(1, 16, self.data_nbytes, self.data_nbytes)
        if padding:
            extra += struct.pack("<2s H", b"FB", padding - 4) + b"Z" * (padding - 4)
        return _local(_NAME, crc, _MAX32, extra)


@functools.lru_cache(maxsize=4096)  # thousands of step counts have the same
def _small_records(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[tuple[bytes, tuple[str, int, int], bytes], ...]:
    """(local header, (name, CRC-32, size), data) of the records before the elements."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Tensor(dtype, shape))
    records = []
    for name, data in zip(_small_names(), (buffer.getvalue(), b"little", b"3\n"), strict=True):
        entry = (name, zlib.crc32(data), len(data))
        records.append((_local(*entry, b""), entry, data))
    return tuple(records)


def _small_names() -> tuple[str, ...]:
    return "archive/data.pkl", "archive/byteorder", "archive/version"


def _local(name: str, crc: int, size: int, extra: bytes) -> bytes:
    fields = (_VERSION, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra))
    return _LOCAL.pack(b"PK\3\4", *fields) + name.encode() + extra


def _central(name: str, crc: int, size: int, position: int, extra: bytes = b"") -> bytes:
    fields = (_VERSION, _VERSION, 0, 0, 0, _DATE, crc, size, size, len(name), len(extra))
    return _CENTRAL.pack(b"PK\1\2", *fields, 0, 0, 0, 0, position) + name.encode() + extra


@dataclass(frozen=True)
class _Storage:
    """Pickles as a reference to record ``data/0``."""

    kind: Any
    numel: int


@dataclass(frozen=True)
class _Tensor:
    """Pickles as a call that rebuilds a tensor over that record."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        numel = torch.Size(self.shape).numel()
        hooks: OrderedDict[str, Any] = OrderedDict()
        place = (0, self.shape, _row_major(self.shape), False, hooks)
        typed = _storage_classes().get(self.dtype)
        if typed is not None:
            storage = _Storage(typed, numel)
            return torch._utils._rebuild_tensor_v2, (storage, *place)
        storage = _Storage(torch.UntypedStorage, numel * self.dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (storage, *place, self.dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return ("storage", value.kind, "0", "cpu", value.numel)
        return None


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _storage_classes() -> dict[torch.dtype, Any]:
    """Typed storage classes; dtypes newer than them are stored untyped."""
    return {
        torch.float32: torch.FloatStorage,
        torch.float64: torch.DoubleStorage,
        torch.float16: torch.HalfStorage,
        torch.bfloat16: torch.BFloat16Storage,
        torch.int8: torch.CharStorage,
        torch.int16: torch.ShortStorage,
        torch.int32: torch.IntStorage,
        torch.int64: torch.LongStorage,
        torch.uint8: torch.ByteStorage,
        torch.bool: torch.BoolStorage,
        torch.complex64: torch.ComplexFloatStorage,
        torch.complex128: torch.ComplexDoubleStorage,
    }


_POLYNOMIAL: Final = 0xEDB88320  # of CRC-32, bits reversed


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32, bits reversed (zlib, crc32.c)."""
    product, mask = 0, 1 << 31
    while True:
        if a & mask:
            product ^= b
            if not a & (mask - 1):
                return product
        mask >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1


@functools.lru_cache(maxsize=64)
def _power(nbytes: int) -> int:
    """x^(8 nbytes) modulo the polynomial."""
    factor, square, exponent = 1 << 31, 1 << 23, nbytes  # x^0; x^8, one byte
    while exponent:
        if exponent & 1:
            factor = _multiply(square, factor)
        square = _multiply(square, square)
        exponent >>= 1
    return factor


def combine_crc(first: int, second: int, second_nbytes: int) -> int:
    """CRC-32 of two byte strings in sequence from those of each (zlib's ``crc32_combine``)."""
    return _multiply(_power(second_nbytes), first) ^ second
