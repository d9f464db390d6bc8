"""The compiled encodes, for a CPU and, interpreted, for a GPU, equal plain PyTorch bit for bit: codes, scales and what
they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from msrnn import kernels
from msrnn.kernels.numba import encode as numba_encode
from msrnn.kernels.numba.formats import decode_scales, to_half
from msrnn.kernels.torch import encode as torch_encode
from msrnn.policy import KV
from tests.support.interpreted import INTERPRETED, nan_in_fresh_memory, run_cases

if INTERPRETED:
    from msrnn.kernels.triton import encode as triton_encode

FORMATS: tuple[KV, ...] = ("int8", "k8v4")
NAMES = ("key codes", "value codes", "scales", "keys", "values")


def rows(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """[2, 3, 40, size] of several magnitudes, then one row of each unusual kind."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(2, 3, 40, size, generator=generator, dtype=dtype)
    numbers *= torch.rand(2, 3, 40, 1, generator=generator, dtype=dtype)
    head = numbers[1, 2]
    head[:8] *= torch.tensor([0, -0.0, 1e-7, 1e-8, 1e-38, 1e5, 1e7, 1e30], dtype=dtype)[:, None]
    head[8:12] = torch.tensor([3, -7e4, 7e4, -torch.inf], dtype=dtype)[:, None]
    head[12] = torch.inf
    for row, number in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf), 13):
        head[row, row % size] = number
    head[17, :2] = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
    head[18] = head[18].abs() * 1e6  # even the lowest number is no float16
    return numbers


def assert_equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], cut_off: bool = False) -> None:
    """`cut_off`: Triton's interpreter cuts a bfloat16's lower bits off, where a GPU rounds."""
    for name, one, two in zip(NAMES, ours, theirs, strict=True):
        error = 2**-7 if cut_off and one.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(one, two, rtol=error, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [4, 20, 64, 80, 128])
@pytest.mark.parametrize("kv", FORMATS)
def test_equals_torch(kv: KV, size: int, dtype: torch.dtype) -> None:
    key, value = rows(size + 1, dtype, size), rows(size, dtype, size + 1)
    assert_equal(numba_encode.encode(key, value, kv), torch_encode.encode(key, value, kv))


@pytest.mark.parametrize("kv", FORMATS)
def test_in_any_order_of_memory(kv: KV) -> None:
    """Keys as models have them, [B, T, G, D], and values from the middle of a fused projection."""
    fused = rows(64, torch.float32, 0).transpose(1, 2).contiguous()
    key, value = fused[..., :32].transpose(1, 2), fused[..., 32:].transpose(1, 2)
    expected = torch_encode.encode(key.contiguous(), value.contiguous(), kv)
    assert_equal(numba_encode.encode(key, value, kv), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv", FORMATS)
def test_into_a_part_of_larger_tensors(kv: KV, dtype: torch.dtype) -> None:
    """As a chunk joins a workspace: what lies around it stays."""
    key, value = rows(20, torch.float32, 0).to(dtype), rows(20, torch.float32, 1).to(dtype)
    expected = torch_encode.encode(key, value, kv)
    whole = [torch.full((2, 3, 50, tensor.shape[3]), 7, dtype=tensor.dtype) for tensor in expected]
    assert_equal(kernels.encode(key, value, kv, [tensor[:, :, 6:46] for tensor in whole]), expected)
    assert all((tensor[:, :, :6] == 7).all() and (tensor[:, :, 46:] == 7).all() for tensor in whole)
    assert_equal(tuple(tensor[:, :, 6:46] for tensor in whole), expected)


@pytest.mark.parametrize("kv", FORMATS)
def test_threads_share_the_heads(kv: KV) -> None:
    """Enough numbers for more than one thread."""
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    key, value = (torch.randn(2, 4, 2200, 64, generator=generator) for _ in range(2))
    torch.set_num_threads(3)
    try:
        assert_equal(numba_encode.encode(key, value, kv), torch_encode.encode(key, value, kv))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_left_to_torch(dtype: torch.dtype) -> None:
    key, value = rows(20, torch.float32, 0).to(dtype), rows(20, torch.float32, 1).to(dtype)
    assert_equal(numba_encode.encode(key, value, "k8v4"), torch_encode.encode(key, value, "k8v4"))


def test_the_dispatch_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled where it can be, plain PyTorch if asked for."""
    calls = []
    monkeypatch.setattr(numba_encode, "encode", lambda *arguments: calls.append("numba"))
    monkeypatch.setattr(torch_encode, "encode", lambda *arguments: calls.append("torch"))
    key = torch.zeros(1, 1, 2, 4)
    for choice in ("compiled", "eager"):
        monkeypatch.setenv("MSRNN_OPS", choice)
        kernels.encode(key, key, "int8")
    assert calls == ["numba", "torch"]


def test_every_float16_is_read_as_it_is() -> None:
    words = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 4)
    expected = words.view(np.float16).astype(np.float32)
    assert np.array_equal(decode_scales(words, np.float32), expected, equal_nan=True)
    assert np.array_equal(np.signbit(decode_scales(words, np.float32)), np.signbit(expected))


def test_numbers_become_the_nearest_float16() -> None:
    """Every float16, the middle between each two, and what lies just beside it; also as float64."""
    halves = torch.arange(0x7C00, dtype=torch.int32).to(torch.uint16).view(torch.float16).float()
    middles = (halves[1:] + halves[:-1]) / 2
    largest = torch.tensor([65504.0, 65519.99, 65520.0, 1e30, torch.inf])
    numbers = torch.cat([halves, middles, middles.nextafter(halves[1:]), middles.nextafter(halves[:-1]), largest])
    for tensor in (numbers, -numbers, numbers.double() * (1 + 2.0**-40)):
        words = np.array([to_half(number) for number in tensor.numpy()], np.uint16)
        expected = tensor.to(torch.float16).view(torch.uint16).numpy()
        assert np.array_equal(words, expected)


@pytest.mark.slow
def test_interpreted() -> None:
    run_cases(__file__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [20, 64])
@pytest.mark.parametrize("kv", FORMATS)
def case_triton_equals_torch(kv: KV, size: int, dtype: torch.dtype) -> None:
    """Into the middle of larger tensors, as a chunk joins a workspace; keys in the order that models have them in."""
    key, value = (rows(n, torch.float32, n).to(dtype) for n in (size + 1, size))
    key = key.transpose(1, 2).contiguous().transpose(1, 2)
    expected = torch_encode.encode(key, value, kv)
    whole = [torch.full((2, 3, 50, tensor.shape[3]), 7, dtype=tensor.dtype) for tensor in expected]
    parts = [tensor[:, :, 6:46] for tensor in whole]
    with nan_in_fresh_memory():
        assert_equal(triton_encode.encode(key, value, kv), expected, cut_off=True)
        triton_encode.encode(key, value, kv, parts)
    assert_equal(tuple(parts), expected, cut_off=True)
    assert all((tensor[:, :, :6] == 7).all() and (tensor[:, :, 46:] == 7).all() for tensor in whole)
    triton_encode.decode(parts[:3], kv, (parts[3].zero_(), parts[4].zero_()))
    assert_equal(tuple(parts), expected, cut_off=True)
