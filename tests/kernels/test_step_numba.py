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
                torch.testing.assert_close(other, tensor, rtol=0, atol=1e-9, msg=name)
        else:  # a rounding may decide otherwise: both go on from the same
            two = one.fork()
    return two


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    kind=st.sampled_from(KINDS),
    gain=st.sampled_from(["", GAIN]),
    capacity=st.integers(2, 9),
    window=st.sampled_from([None, None, 3, 8]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    sizes=st.sampled_from([(4, 4), (5, 3), (17, 8)]),
    strided=st.booleans(),
)
def test_equals_torch(
    seed: int, kind: str, gain: str, capacity: int, window: int | None, softcap: float | None, has_sinks: bool,
    batch: int, heads: tuple[int, int], sizes: tuple[int, int], strided: bool,
) -> None:  # fmt: skip
    sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64) if has_sinks else None
    attention = Attention(0.7, softcap, window, sinks)
    policy = parse_policy(kind.format(capacity) + gain)
    compare(policy, attention, (batch, *heads, *sizes), capacity + 6, seed, strided=strided)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", ["h2o:7", "h2o-layer:7,gain=value_norm"])
def test_other_dtypes(text: str, dtype: torch.dtype) -> None:
    """float16 is left to plain PyTorch."""
    compare(parse_policy(text), Attention(0.3), (2, 4, 2, 16, 8), 12, 0, dtype)


@pytest.mark.parametrize("text", ["tova:9", "h2o:9,gain=value_norm"])
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
