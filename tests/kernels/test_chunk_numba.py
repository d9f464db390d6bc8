"""The CPU's compiled chunks equal the plain ones in PyTorch: outputs, expiry and what is left, chunk by chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msrnn import kernels
from msrnn.core import recurrence
from msrnn.core.attention import Attention
from msrnn.core.recurrence import step_numbers
from msrnn.core.slots import Slots
from msrnn.core.workspace import Workspace
from msrnn.kernels.numba import chunk as numba_chunk
from msrnn.policy import Policy, parse_policy

HEADS, KV_HEADS, SIZE, SINKS = 4, 2, 4, torch.tensor([0.5, -1, 3, 0], dtype=torch.float64)
POLICIES = (
    *("tova:6", "tova+2:6,last=2", "tova:6,momentum=0.5", "h2o:6", "h2o-layer+1:6", "tova-query-head:4"),
    *("window:5", "window+2:6", "tova:1", "tova:6,gain=value_norm", "h2o:6,gain=value_norm"),
    *("tova-head:5,gain=value_norm", "tova-query-head:5,gain=value_norm", "tova:6,momentum=0.5,gain=value_norm"),
    *("tova:6,kv=int8", "tova:6,kv=k8v4", "window+2:6,kv=int8", "h2o:6,gain=value_norm,kv=k8v4"),
    *("tova-query-head:5,kv=k8v4", "tova:6,momentum=0.5,gain=value_norm,kv=int8"),
)


def tokens(seed: int, batch: int, length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(batch, heads, length, SIZE, generator=generator, dtype=dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return 3 * query, key, value


def run(
    kind: Any, slots: Slots, new: tuple[Tensor, Tensor, Tensor], policy: Policy, attention: Attention, size: int,
    real: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """All tokens in chunks of `size` by one kind of Chunks: outputs, and each chunk's expiry."""
    query, key, value = (new[0], *slots.expand(*new[1:]))
    space, output = Workspace(slots, key, size), torch.empty_like(query)
    steps, total, expiries = step_numbers(slots, real, query.shape[2]), query.shape[2], []
    chunks = kind(space, (query, key, value), steps, policy, attention, output)
    for start in range(0, total, size):
        part = slice(start, min(start + size, total))
        expiry = chunks.attend(part)
        assert expiry is not None
        expiries.append(expiry.clone())
        chunks.evict(expiry)
        slots.fed += part.stop - part.start
    slots.seen += (steps >= 0).sum(1)
    space.close()
    return output, expiries


def compare(
    policy: Policy, attention: Attention, parts: list[tuple[Tensor, Tensor, Tensor]], size: int,
    real: list[Tensor | None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Both read the same texts one after the other, each into its own slots."""
    one, two = (Slots.empty(policy, *parts[0][1:], HEADS, attention.window) for _ in range(2))
    for new, mask in zip(parts, real, strict=True):
        with monkeypatch.context() as patch:
            patch.setenv("MSRNN_OPS", "eager")
            expected, expiries = run(recurrence.Chunks, one, new, policy, attention, size, mask)
        output, compiled_expiries = run(numba_chunk.Chunks, two, new, policy, attention, size, mask)
        shown = torch.ones(output.shape[0], output.shape[2], dtype=torch.bool) if mask is None else mask
        rows, other_rows = (tensor.transpose(1, 2)[shown] for tensor in (output, expected))
        torch.testing.assert_close(rows, other_rows, rtol=0, atol=1e-9)
        assert output.isfinite().all()
        for expiry, other in zip(compiled_expiries, expiries, strict=True):
            assert torch.equal(expiry, other)
        assert_same(one, two)


def assert_same(one: Slots, two: Slots) -> None:
    """All tensors, but for what an empty slot still holds."""
    empty = one.positions < 0
    for name, tensor in one.tensors().items():
        other = two.tensors()[name]
        if name in ("keys", "values", "scales", "scores", "gains"):
            hidden = empty.repeat_interleave(tensor.shape[1] // empty.shape[1], 1)
            hidden = hidden.view(*hidden.shape, *[1] * (tensor.dim() - 3))
            tensor, other = tensor.masked_fill(hidden, 0), other.masked_fill(hidden, 0)
        torch.testing.assert_close(other, tensor, rtol=0, atol=1e-9, msg=name)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    text=st.sampled_from(POLICIES),
    window=st.sampled_from([None, None, 3, 5, 9]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    batch=st.integers(1, 2),
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=3),
    size=st.integers(1, 7),
    padded=st.booleans(),
)
def test_equals_torch(
    seed: int, text: str, window: int | None, softcap: float | None, has_sinks: bool, batch: int, lengths: list[int],
    size: int, padded: bool,
) -> None:  # fmt: skip
    policy, attention = parse_policy(text), Attention(0.7, softcap, window, SINKS if has_sinks else None)
    parts = [tokens(seed + i, batch, length) for i, length in enumerate(lengths)]
    generator = torch.Generator().manual_seed(seed)
    real = [torch.rand(batch, length, generator=generator) < 0.7 if padded else None for length in lengths]
    with pytest.MonkeyPatch.context() as monkeypatch:
        compare(policy, attention, parts, size, real, monkeypatch)


@pytest.mark.parametrize("text", ["tova:40", "h2o:40,gain=value_norm", "window+2:40", "tova:40,kv=k8v4"])
def test_whole_chunks_of_64_rows(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(parse_policy(text), Attention(0.7), [tokens(1, 2, 300)], numba_chunk.ROWS, [None], monkeypatch)


@pytest.mark.parametrize("text", ["tova:6", "h2o:6,gain=value_norm", "window+2:6", "tova:6,kv=int8"])
def test_exponentials_out_of_range_leave_everything_as_it_was(text: str) -> None:
    """Then the caller takes the plain chunks; what was held and scored must still be there."""
    policy, attention = parse_policy(text), Attention(0.7)
    query, key, value = tokens(3, 1, 20)
    slots = Slots.empty(policy, key, value, HEADS)
    run(numba_chunk.Chunks, slots, (query, key, value), policy, attention, 5)
    query, key, value = tokens(4, 1, 5)
    query[:, :, 3] *= 1e4
    space, output = Workspace(slots, key, 5), torch.empty_like(query)
    steps, used = step_numbers(slots, None, 5), space.used
    before = [None if tensor is None else tensor.clone() for tensor in space.columns]
    chunks = numba_chunk.Chunks(space, (query, key, value), steps, policy, attention, output)
    assert chunks.attend(slice(0, 5)) is None
    assert space.used == used
    for tensor, old in zip(space.columns, before, strict=True):
        assert tensor is old is None or torch.equal(tensor, old)
    assert chunks.attend(slice(0, 3)) is not None, "rows before it are in range"


def test_the_dispatch_takes_them_where_it_can() -> None:
    """float32 and float64 on a CPU, a limit, no research rule; the same test would compare plain with plain else."""
    query, key, value = tokens(0, 1, 9, torch.float32)
    for text, dtype, fast in (
        ("tova:4", torch.float32, True),
        ("tova:4,kv=k8v4", torch.float32, True),
        ("tova:4", torch.bfloat16, False),
        ("full", torch.float32, False),
        ("key_difference:4", torch.float32, False),
    ):
        new = tuple(tensor.to(dtype) for tensor in (query, key, value))
        policy = parse_policy(text)
        slots = Slots.empty(policy, *new[1:], HEADS)
        space, steps = Workspace(slots, new[1], 4), step_numbers(slots, None, 9)
        chunks = kernels.fast_chunks(space, new, steps, policy, Attention(1.0), torch.empty_like(new[0]))
        assert isinstance(chunks, numba_chunk.Chunks) == fast, (text, dtype)
