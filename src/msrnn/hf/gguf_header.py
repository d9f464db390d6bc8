"""A GGUF file's header against its size: counts, lengths and places that the file cannot hold are refused.

Readers of GGUF trust the header: a declared array of 2^60 numbers keeps them busy for ever, or takes all memory.
"""

from __future__ import annotations

import struct
from io import BufferedReader
from pathlib import Path

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by its type
_FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_DEEPEST = 4  # arrays in arrays
_WEIGHTS_PER_BYTE = 16  # more than any quantization has


def check_gguf(path: Path) -> None:
    """Raise ValueError if the header does not fit the file."""
    with path.open("rb") as file:
        _Header(file, path.stat().st_size).check()


class _Header:
    def __init__(self, file: BufferedReader, size: int) -> None:
        self.file, self.size = file, size
        self.sizes: dict[str, int] = {}  # whole numbers, by the last parts of their names

    def check(self) -> None:
        magic, version = self.file.read(4), self._number("<I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it is not a GGUF file of version 2 or 3 ({magic!r}, {version})")
        tensors, pairs = self._number("<Q"), self._number("<Q")
        self._room(tensors * 24 + pairs * 13, f"{tensors} tensors and {pairs} settings")
        for _ in range(pairs):
            self._setting()
        self._check_model(tensors)
        ends = [self._tensor() for _ in range(tensors)]
        start = self.file.tell()
        self._room(max(ends, default=0), "its tensors", start)

    def _setting(self) -> None:
        length = self._number("<Q")
        self._room(length, "a name")
        name, kind = self.file.read(length), self._number("<I")
        if kind in _FORMS:
            self.sizes[name.decode("utf-8", "replace").partition(".")[2]] = self._number(_FORMS[kind])
        else:
            self._value(kind, 0)

    def _check_model(self, tensors: int) -> None:
        """A model that the file has no weights for would be made of random ones, however large."""
        layers, width = self.sizes.get("block_count", 1), self.sizes.get("embedding_length", 1)
        if not 0 < layers <= tensors:
            raise ValueError(f"{layers} layers are not in {tensors} tensors")
        heads, size = self.sizes.get("attention.head_count", 1), self.sizes.get("attention.key_length", 1)
        inner, experts = self.sizes.get("feed_forward_length", 1), self.sizes.get("expert_count", 0) or 1
        for weights in (width * self.sizes.get("vocab_size", 1), width * inner * experts, width * heads * size):
            if not 0 < weights <= _WEIGHTS_PER_BYTE * self.size:
                raise ValueError(f"a matrix of {weights:,} weights is not in {self.size:,} bytes")

    def _tensor(self) -> int:
        """Where its bytes end, counted from the first tensor's."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        self._skip(self._number("<Q"), "a tensor's name")
        dimensions = self._number("<I")
        if dimensions > 4:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        count = 1
        for _ in range(dimensions):
            count *= self._number("<Q")
        kind, offset = self._number("<I"), self._number("<Q")
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ValueError(f"a tensor has the unknown type {kind}") from None
        return int(offset + count // block * size)

    def _value(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._skip(self._number("<Q"), "a text")
        elif kind == _ARRAY and depth < _DEEPEST:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in _SIZES:
                self._skip(count * _SIZES[inner], f"a list of {count}")
                return
            self._room(count * 8, f"a list of {count}")
            for _ in range(count):
                self._value(inner, depth + 1)
        elif kind in _SIZES:
            self._skip(_SIZES[kind], "a number")
        else:
            raise ValueError(f"a setting has the unknown type {kind}")

    def _skip(self, count: int, what: str) -> None:
        self._room(count, what)
        self.file.seek(count, 1)

    def _room(self, count: int, what: str, start: int | None = None) -> None:
        start = self.file.tell() if start is None else start
        if start + count > self.size:
            raise ValueError(f"{what} would end at byte {start + count:,} of {self.size:,}: it is cut short or damaged")

    def _number(self, form: str) -> int:
        raw = self.file.read(struct.calcsize(form))
        if len(raw) < struct.calcsize(form):
            raise ValueError(f"it is cut short: {self.size:,} bytes")
        return int(struct.unpack(form, raw)[0])
