"""UTF-8 texts read block by block."""

from __future__ import annotations

import io
import re

import pytest

from msrnn.system.text import read_blocks


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1 << 16])
def test_blocks_join_to_the_text(tmp_path, size):
    text = "日本語\r\nnaïve 🙂\x00 end\r"
    (tmp_path / "text").write_bytes(text.encode())
    assert "".join(read_blocks(tmp_path / "text", size)) == text
    assert "".join(read_blocks(str(tmp_path / "text"), size)) == text
    assert "".join(read_blocks(io.BytesIO(b"\xef\xbb\xbf" + text.encode()), size)) == text
    assert list(read_blocks(io.BytesIO(b""), size)) == []


@pytest.mark.parametrize("size", [1, 4, 7, 1 << 16])
@pytest.mark.parametrize(
    "raw, place",
    [(b"caf\xe9 au lait", 3), ("日本".encode() + b"\xff", 6), (b"abc\xe6\x97", 3), ("été".encode("utf-16"), 0)],
)
def test_what_is_not_text_is_refused_with_its_place(tmp_path, raw, place, size):
    (tmp_path / "bad").write_bytes(raw)
    with pytest.raises(ValueError, match=f"byte {place} is 0x{raw[place]:02x}") as caught:
        list(read_blocks(tmp_path / "bad", size))
    assert re.match(rf"{tmp_path}/bad is not UTF-8 text", str(caught.value))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="standard input is not UTF-8"):
        list(read_blocks(io.BytesIO(raw), size))
