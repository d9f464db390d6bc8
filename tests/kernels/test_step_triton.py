"""The Triton step, interpreted on the CPU, equals the plain one over many tokens: state, slots, scores and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.core.attention import Attention
from msrnn.core.slots import State
from msrnn.kernels.torch import step as eager_step
from msrnn.policy import parse
from tests.support.interpreted import INTERPRETED, run_cases

if INTERPRETED:
    from msrnn.kernels.triton import step as gpu_step


def test_interpreted() -> None:
    run_cases(__file__)


@pytest.fixture(autouse=INTERPRETED)
def poisoned() -> Iterator[None]:
    """NaN in all memory that is fresh."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    gpu_step._cut.cache_clear()
    torch.use_deterministic_algorithms(False)


def steps(text: str, attention: Attention, shape: tuple[int, int, int], dtype: torch.dtype = torch.float64) -> None:
    """Both go on from a state that is almost full, each with its own; a row is inactive now and then."""
    policy, (batch, heads, kv_heads) = parse(text), shape
    length, made = (policy.capacity or 7) + 3, torch.Generator().manual_seed(len(text))
    query = 3 * torch.randn(length, batch, heads, 20, generator=made, dtype=dtype)
    key, value = (torch.randn(length, batch, kv_heads, n, generator=made, dtype=dtype) for n in (20, 12))
    share = heads // kv_heads if policy.scope == "query_head" else 1
    key, value = key.repeat_interleave(share, 2), value.repeat_interleave(share, 2)
    one = State.empty(policy, key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), heads, attention.window)
    if policy.capacity is None:  # as few slots as will be needed, and one
        one.keys, one.values, one.positions = (
            rows[:, :, :10].clone() for rows in (one.keys, one.values, one.positions)
        )
    slot = torch.zeros(one.positions.shape[:2], dtype=torch.int64)
    for t in range(length - 4):
        advance(eager_step.step, one, slot, one.seen.clone(), query[t], key[t], value[t], policy, attention)
    two, other = one.fork(), slot.clone()
    for t in range(length - 4, length):
        seen = torch.where(torch.rand(batch, generator=made) < 0.1, -1, one.seen)
        want = advance(eager_step.step, one, slot, seen, query[t], key[t], value[t], policy, attention)
        got = advance(gpu_step.step, two, other, seen, query[t], key[t], value[t], policy, attention)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9 if dtype == torch.float64 else 2e-3)
        assert torch.equal(slot, other), f"token {t}"
        same(one, two)


def advance(step: Any, state: State, slot: Tensor, seen: Tensor, *rest: Any) -> Tensor:
    """`rest`: query, key, value, policy, attention."""
    held = (state.keys, state.values, state.positions, state.scores, slot, seen)
    out: Tensor = step(*rest[:3], *held, *rest[3:])
    if len(seen) == len(state.seen):
        state.seen += seen >= 0
    return out


def same(one: State, two: State) -> None:
    for name, tensor in one.tensors().items():
        other: Tensor = two.tensors()[name]
        if name == "scores":  # what an empty slot has scored means nothing
            tensor, other = (scores.masked_fill(one.positions < 0, 0) for scores in (tensor, other))
        torch.testing.assert_close(other, tensor, rtol=0, atol=1e-9 if tensor.dtype == torch.float64 else 1e-5)


POLICIES = (
    "tova:6",
    "tova+2:9,last=3",
    "h2o:7",
    "tova-query-head:9",
    "h2o-layer+1:6,momentum=0.9",
    "window:5",
    "tova-head:5",
    "tova-query-head:5,momentum=1.0",
    "window+2:6",
    "full",
)
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, sinks": {"softcap": 2.0, "sinks": torch.tensor([0.5, -1, 3, 0], dtype=torch.float64)},
    "window": {"window": 5},
    "wide window": {"window": 9},
}


PAIRS = [(policy, list(ATTENTION)[(i + j) % 4]) for i, policy in enumerate(POLICIES) for j in range(2)]


@pytest.mark.parametrize("policy, attention", PAIRS)
def case_equals_eager(policy: str, attention: str) -> None:
    steps(policy, Attention(0.4, **ATTENTION[attention]), (2 if attention == "plain" else 1, 4, 2))


def case_a_window_of_one_has_a_single_slot() -> None:
    steps("tova:3", Attention(0.4, window=1), (1, 2, 2))


@pytest.mark.parametrize("policy", ["h2o:7", "tova-query-head:9", "window+2:6"])
def case_states_that_lie_anywhere(policy: str) -> None:
    """Two of four states, with room between them: as plain PyTorch leaves them, and nobody else is touched."""
    made, how, rows = parse(policy), Attention(0.4), torch.tensor([3, 1])
    query, key, value = (torch.randn(12, 2, n, 20, dtype=torch.float64) for n in (4, 4, 4))
    if made.scope != "query_head":
        key, value = key[:, :, :2], value[:, :, :2]
    like = key.new_zeros(4, key.shape[2], 1, 20)
    one = State.empty(made, like, like, 4)
    slot, seen = torch.zeros(*one.positions.shape[:2], dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    two = one._map(apart)
    other, two.seen = apart(slot), one.seen
    for t in range(12):
        want = advance(eager_step.step, one, slot, seen + t, query[t], key[t], value[t], made, how, rows)
        held = (two.keys, two.values, two.positions, two.scores, other, seen + t)
        got = gpu_step.step(query[t], key[t], value[t], *held, made, how, rows)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
        assert torch.equal(slot, other)
        same(one, two)


def apart(tensor: Tensor) -> Tensor:
    """The same numbers in memory where every row is followed by something else."""
    room = torch.full((len(tensor), tensor[0].numel() + 5), 77, dtype=tensor.dtype)[:, : tensor[0].numel()]
    return room.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("policy, dtype", [("tova:6", torch.float16), ("h2o:20", torch.float32)])
def case_narrow(policy: str, dtype: torch.dtype) -> None:
    steps(policy, Attention(0.4), (1, 4, 2), dtype)


@pytest.mark.parametrize("policy, heads", [("tova:40", (3, 1)), ("h2o:18", (2, 2)), ("window:34", (2, 2))])
def case_shares_of_a_head(policy: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_step, "_FEW", (32, 4, 8))
    monkeypatch.setattr(gpu_step, "_GROUPED", (32, 4, 8))
    steps(policy, Attention(0.4), (1, *heads))


@pytest.mark.parametrize("policy, heads", [("tova:40", (1, 1)), ("tova-head:17", (4, 2))])
def case_one_program_per_head(policy: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_step, "_ENOUGH", 0)
    for kind in ("_GROUPED", "_MANY"):
        monkeypatch.setattr(gpu_step, kind, (32, 4, 0))
    steps(policy, Attention(0.4), (1, *heads))


@pytest.mark.parametrize("policy, notes", [("tova:20", 2), ("h2o:18", 2), ("window:17", 0)])
def case_decided_beside_the_model(policy: str, notes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches instead of one, and notes that are used again; not where age decides."""
    monkeypatch.setattr(gpu_step, "_FEW", (32, 4, 8))
    side = gpu_step.Side(torch.device("cpu"))
    with side:
        steps(policy, Attention(0.4), (1, 2, 2))
    assert len(side.notes) == notes


def case_all_equal_the_oldest_leaves() -> None:
    policy, attention = parse("tova:5"), Attention(0.0)
    zeros = torch.zeros(1, 1, 16, dtype=torch.float64)
    state = State.empty(policy, zeros[:, :, None], zeros[:, :, None], 1)
    slot = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(9):
        held = (state.keys, state.values, state.positions, None, slot, state.seen)
        gpu_step.step(zeros, zeros, zeros, *held, policy, attention)
        state.seen += 1
    assert sorted(state.positions.flatten().tolist()) == [-1, 4, 5, 6, 7, 8]


def case_a_part_of_a_buffer_is_refused() -> None:
    policy, attention = parse("tova:5"), Attention(1.0)
    new, rows = torch.zeros(2, 2, 16), torch.zeros(2, 2, 9, 16)[:, :, :6]
    ints = torch.zeros(2, 1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="contiguous"):
        gpu_step.step(new, new, new, rows, rows, ints, None, ints[:, :, 0], ints[:, 0, 0], policy, attention)
