"""Slot formats: worked examples, bounds on what is lost, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msrnn.core import formats
from msrnn.core.slots import Slots
from msrnn.policy import KV, parse_policy

FORMATS: tuple[KV, ...] = ("int8", "k8v4")


def random_rows(size: int, seed: int, dtype: torch.dtype, magnitude: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (magnitude * torch.randn(2, 3, 5, size, generator=generator, dtype=torch.float64)).to(dtype)


def test_8_bits_by_hand() -> None:
    """The largest number is 127 x 0.5, so codes count halves, the even one of two equally near."""
    key = torch.tensor([63.5, -63.5, 1.0, 0.25, 0.75, -0.3, 0.0])
    codes, _, scales = formats.encode(key, torch.zeros(2), "int8")
    assert codes.tolist() == [127, -127, 2, 0, 2, -1, 0]
    assert codes.dtype == torch.int8
    assert scales.tolist() == [0.5, 2.0**-24]  # no scale is 0
    assert formats.decode(codes, torch.zeros(2, dtype=torch.int8), scales, "int8", torch.float32)[0].tolist() == [
        63.5, -63.5, 1.0, 0.0, 1.0, -0.5, 0.0
    ]  # fmt: skip


def test_4_bits_by_hand() -> None:
    """8 numbers are two groups: from -1 to 6.5, in halves, and from 0 to 30, in twos. Byte j holds j and j + 4."""
    value = torch.tensor([-1.0, 6.5, 0.3, 2.0, 30.0, 0.0, 5.0, 8.9])
    _, codes, scales = formats.encode(torch.zeros(2), value, "k8v4")
    assert scales.tolist() == [2.0**-24, 0.5, 2.0, -1.0, 0.0]  # the key's, the groups', their lowest numbers
    assert codes.tolist() == [0 + 16 * 15, 15 + 16 * 0, 3 + 16 * 2, 6 + 16 * 4]
    assert codes.dtype == torch.uint8
    decoded = formats.decode(torch.zeros(2, dtype=torch.int8), codes, scales, "k8v4", torch.float32)[1]
    assert decoded.tolist() == [-1.0, 6.5, 0.5, 2.0, 30.0, 0.0, 4.0, 8.0]


def test_4_bits_in_groups_of_32() -> None:
    """Each group has a scale of its own: small numbers beside large ones lose nothing."""
    value = torch.cat([torch.arange(32) % 16 * 0.125, 100 * (torch.arange(32) % 16) - 700.0])
    _, codes, scales = formats.encode(value, value, "k8v4")
    assert scales[1:].tolist() == [0.125, 100, 0, -700]
    decoded = formats.decode(torch.zeros(64, dtype=torch.int8), codes, scales, "k8v4", torch.float32)[1]
    assert torch.equal(decoded, value)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([4, 20, 64, 80]),
    exponent=st.integers(-12, 8),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_the_error_is_at_most_half_a_scale(seed: int, size: int, exponent: int, dtype: torch.dtype) -> None:
    """And what a scale or a lowest number loses in float16 by rounding, times the largest code."""
    rows = random_rows(size, seed, dtype, 2.0**exponent)
    for kv in FORMATS:
        codes = formats.encode(rows, rows, kv)
        key, value = (row.double() for row in formats.decode(*codes, kv, torch.float64))
        scales = codes[2].double()
        lost = 2.0**-11 * rows.double().abs().amax(-1, keepdim=True) + 2.0**-25 * 127
        assert ((key - rows.double()).abs() <= scales[..., :1] / 2 + lost).all()
        groups = scales.shape[-1] // 2 if kv == "k8v4" else 1
        scale = scales[..., 1 : 1 + groups].repeat_interleave(size // groups, -1)
        assert ((value - rows.double()).abs() <= scale / 2 + 2 * lost).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [4, 20, 64])
def test_what_was_decoded_keeps_its_8_bit_codes(size: int, dtype: torch.dtype) -> None:
    """A state that is decoded and encoded again is the same state."""
    rows = random_rows(size, size, dtype)
    codes = formats.encode(rows, rows, "int8")
    again = formats.encode(*formats.decode(*codes, "int8", dtype), "int8")
    for one, two in zip(codes, again, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("kv", FORMATS)
def test_a_row_is_encoded_alone(kv: KV) -> None:
    """Whatever stands beside it, in a batch or in a chunk."""
    key, value = random_rows(64, 1, torch.float32), random_rows(32, 2, torch.float32)
    whole, part = formats.encode(key, value, kv), formats.encode(key[1, 2, 3], value[1, 2, 3], kv)
    for one, two in zip(whole, part, strict=True):
        assert torch.equal(one[1, 2, 3], two)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kv", FORMATS)
def test_what_is_no_number_stays_none(kv: KV, number: float) -> None:
    """An overflow must be seen. In 4 bits only its own group is lost."""
    key, value = torch.ones(64), torch.ones(64)
    key[3], value[40] = number, number
    decoded = formats.decode(*formats.encode(key, value, kv), kv, torch.float32)
    assert not decoded[0][3].isfinite()
    assert not decoded[1][40].isfinite()
    if kv == "k8v4":
        assert torch.equal(decoded[1][:32], value[:32])


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("sizes", [(64, 64), (20, 80), (5, 4)])
def test_sizes_and_bytes_are_those_of_the_slots(kv: KV, sizes: tuple[int, int]) -> None:
    key, value = (torch.zeros(1, 2, 1, size) for size in sizes)
    slots = Slots.empty(parse_policy(f"window:6,kv={kv}"), key, value, 2)
    codes = formats.encode(key, value, kv)
    for stored, new in zip(slots.codes, codes, strict=True):
        assert (stored.shape[3], stored.dtype) == (new.shape[3], new.dtype)
    held = sum(stored[0, 0, 0].numel() * stored.itemsize for stored in slots.codes)
    assert held == formats.slot_bytes(kv, *sizes, torch.float32)
    assert slots.sizes == sizes


def test_bytes_by_hand() -> None:
    assert formats.slot_bytes(None, 64, 64, torch.float32) == 512
    assert formats.slot_bytes("int8", 64, 64, torch.float32) == 64 + 64 + 2 * 2
    assert formats.slot_bytes("k8v4", 64, 64, torch.float32) == 64 + 32 + 2 * (1 + 2 * 2)


def test_values_of_odd_size_are_refused_in_4_bits() -> None:
    new = torch.zeros(1, 2, 1, 17)
    with pytest.raises(ValueError, match="a multiple of 4, and it is 17; use kv=int8"):
        Slots.empty(parse_policy("tova:6,kv=k8v4"), new, new, 2)
    assert Slots.empty(parse_policy("tova:6,kv=int8"), new, new, 2).kv == "int8"
