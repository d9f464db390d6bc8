"""Sizes in bytes as people write and read them."""

import pytest

from msrnn.system.sizes import human, parse_bytes


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (23.6 * 2**20, "23.6 MiB"), (2**41, "2048.0 GiB")],
)
def test_human(count: float, text: str) -> None:
    assert human(count) == text


@pytest.mark.parametrize(
    "text, count",
    [
        ("1024", 1024),
        ("16GiB", 16 << 30),
        ("500 MB", 500_000_000),
        ("1.5kib", 1536),
        ("7B", 7),
        (" 2gb ", 2 * 10**9),
        ("0.3GB", 300_000_000),
        ("1.001kB", 1001),  # a float would give 1000
    ],
)
def test_parse_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "12 parsecs", "1e9", "1.2.3MB", "5I", "3TB", "\u0661GiB"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write"):
        parse_bytes(text)
