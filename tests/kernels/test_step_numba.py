"""The CPU's compiled step equals plain PyTorch on random slots: any strides, dtypes and number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msrnn.core.attention import Attention
from msrnn.core.slots import Slots
from msrnn.kernels.numba import step as numba_step
from msrnn.kernels.torch import step as torch_step
from msrnn.policy import Policy, parse_policy

KINDS = ("tova:{}", "tova+1:{},last=1", "h2o:{}", "h2o-layer:{}", "tova-head:{}", "tova-query-head:{}", "window+1:{}")
GAIN = ",gain=value_norm"
FORMATS = ("", ",kv=int8", ",kv=k8v4")


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, strided: bool) -> Tensor:
    """Random numbers; `strided`: as a part of a larger tensor whose last dimension is not dense."""
    if not strided:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    whole = torch.randn(shape[1], shape[0], shape[2] + 1, 2, generator=generator, dtype=torch.float64).to(dtype)
    return whole[:, :, 1:, 0].transpose(0, 1)


def compare(
    policy: Policy, attention: Attention, shape: tuple[int, int, int, int, int], steps: int, seed: int,
    dtype: torch.dtype = torch.float64, strided: bool = False,
) -> Slots:  # fmt: skip
    """shape: batch, heads, KV heads, head size, value size. Both take the same tokens; the compiled one's slots."""
    (batch, heads, kv_heads, size, width), generator = shape, torch.Generator().manual_seed(seed)
    like = [torch.zeros(batch, kv_heads, 1, n, dtype=dtype) for n in (size, width)]
    one, two = (Slots.empty(policy, *like, heads, attention.window) for _ in range(2))
    tolerance = 1e-9 if dtype == torch.float64 else 2e-2
    for _ in range(steps):
        query, key, value = (
            draw((batch, count, n), generator, dtype, strided)
            for count, n in ((heads, size), (kv_heads, size), (kv_heads, width))
        )
        key, value = one.expand(key, value)
        expected = torch_step.step(one, query, key, value, policy, attention)
        output = numba_step.step(two, query, key, value, policy, attention)
        torch.testing.assert_close(output, expected, rtol=0, atol=tolerance)
        for slots in (one, two):
            slots.seen += 1
        if dtype == torch.float64:
            for name, tensor in one.tensors().items():
                other = two.tensors()[name]
                if name == "scores":
                    tensor, other = (scores.masked_fill(one.positions < 0, 0) for scores in (tensor, other))
                exact = name in ("keys", "values", "scales")
                torch.testing.assert_close(other, tensor, rtol=0, atol=0 if exact else 1e-9, msg=name)
        else:  # a rounding may decide otherwise: both go on from the same
            assert_same_newcomer(one, two)
            two = one.fork()
    return two


def assert_same_newcomer(one: Slots, two: Slots) -> None:
    """Keys, values and scales are stored bit for bit alike, whatever leaves; gains but for a rounding."""
    for name in ("keys", "values", "scales"):
        if getattr(one, name) is not None:
            assert torch.equal(getattr(one, name), getattr(two, name)), name
    if one.gains is not None and two.gains is not None:
        torch.testing.assert_close(one.gains, two.gains, rtol=1e-5, atol=0)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    kind=st.sampled_from(KINDS),
    gain=st.sampled_from(["", GAIN]),
    kv=st.sampled_from(FORMATS),
    capacity=st.integers(2, 9),
    window=st.sampled_from([None, None, 3, 8]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    sizes=st.sampled_from([(4, 4), (5, 3), (17, 8), (20, 80), (64, 64)]),
    strided=st.booleans(),
)
def test_equals_torch(
    seed: int, kind: str, gain: str, kv: str, capacity: int, window: int | None, softcap: float | None,
    has_sinks: bool, batch: int, heads: tuple[int, int], sizes: tuple[int, int], strided: bool,
) -> None:  # fmt: skip
    sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64) if has_sinks else None
    attention = Attention(0.7, softcap, window, sinks)
    kv = ",kv=int8" if kv and sizes[1] % 4 else kv  # 4-bit values need a size that 4 divides
    policy = parse_policy(kind.format(capacity) + gain + kv)
    compare(policy, attention, (batch, *heads, *sizes), capacity + 6, seed, strided=strided)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "text", ["h2o:7", "h2o-layer:7,gain=value_norm", "h2o:7,kv=int8", "h2o-layer:7,gain=value_norm,kv=k8v4"]
)
def test_other_dtypes(text: str, dtype: torch.dtype) -> None:
    """float16 is left to plain PyTorch."""
    compare(parse_policy(text), Attention(0.3), (2, 4, 2, 16, 8), 12, 0, dtype)


@pytest.mark.parametrize("text", ["tova:9", "h2o:9,gain=value_norm", "tova:9,kv=int8", "h2o:9,kv=k8v4"])
def test_threads_share_the_heads_of_a_batch(threads: int, text: str) -> None:
    """Many more tasks than threads, on PyTorch's own threads; bit for bit as on one."""
    policy, attention, shape = parse_policy(text), Attention(0.7), (16, 8, 4, 8, 8)
    slots = compare(policy, attention, shape, 14, 5)
    torch.set_num_threads(1)
    alone = compare(policy, attention, shape, 14, 5)
    for name, tensor in alone.tensors().items():
        assert torch.equal(slots.tensors()[name], tensor), name


def test_slots_whose_heads_do_not_lie_together_are_refused() -> None:
    policy, new = parse_policy("tova:5"), torch.zeros(2, 2, 16)
    slots = Slots.empty(policy, new[:, :, None], new[:, :, None], 2)
    broken = replace(slots, keys=torch.zeros(2, 2, 6, 32)[..., ::2])
    with pytest.raises(ValueError, match="keys has the strides"):
        numba_step.step(broken, new, new, new, policy, Attention(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv", ["int8", "k8v4"])
def test_codes_of_unusual_numbers_equal_torch(kv: str, dtype: torch.dtype) -> None:
    """What a step stores: rows of one number, of none, of tiny, huge and infinite ones, and NaN."""
    factors = torch.tensor([1, 0, 1e-7, 3e-8, 1e-38, 1e4, 1e6, 1e30, torch.inf, torch.nan], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(10, 2, 48, generator=generator, dtype=torch.float64) for _ in range(3))
    key, value = key * factors[:, None, None], value * factors.roll(1)[:, None, None]
    query, key, value = (new.to(dtype) for new in (query, key, value))
    policy = parse_policy(f"tova:5,kv={kv}")
    one, two = (Slots.empty(policy, key[:, :, None], value[:, :, None], 2) for _ in range(2))
    torch_step.step(one, query, key, value, policy, Attention(0.7))
    numba_step.step(two, query, key, value, policy, Attention(0.7))
    for name in ("keys", "values", "scales"):
        ours, theirs = getattr(two, name), getattr(one, name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=name)
