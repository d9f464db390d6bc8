"""One step in place, in plain PyTorch and compiled, equals the definition: every policy, scope, window, sinks."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.core import recurrence, reference
from msrnn.core.attention import Attention
from msrnn.core.slots import State
from msrnn.kernels.step import step
from msrnn.policy import Policy, parse

POLICIES = (
    "tova:6",
    "tova+2:6,last=2",
    "tova:6,momentum=0.5",
    "tova:1",
    "h2o:6",
    "h2o-layer+1:6",
    "tova-head:5",
    "tova-query-head:4",
    "window:5",
    "window+2:6",
)
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, sinks": {"softcap": 2.0, "sinks": torch.tensor([0.5, -1, 3, 0], dtype=torch.float64)},
    "window": {"window": 5},
    "narrow window": {"window": 3},
    "wide window": {"window": 9},
}
HEADS, GROUPS, SIZE = 4, 2, 4


@pytest.fixture(autouse=True, params=["eager", "compiled"])
def operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSRNN_OPS", request.param)


def tokens(length: int, seed: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, length, SIZE) for n in (HEADS, GROUPS, GROUPS)]
    query, key, value = (torch.randn(*shape, generator=made, dtype=torch.float64) for shape in shapes)
    return 3 * query, key, value


def stepped(
    state: State, slot: Tensor, query: Tensor, key: Tensor, value: Tensor, policy: Policy, attention: Attention
):
    """Token by token; the output of all."""
    share = state.keys.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    outputs = []
    for t in range(query.shape[2]):
        new = (query[:, :, t], key[:, :, t], value[:, :, t])
        held = (state.keys, state.values, state.positions, state.scores, slot, state.seen)
        outputs.append(step(*new, *held, policy, attention))
        state.seen += state.seen >= 0
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attention", ATTENTION)
def test_equals_the_definition(policy: str, attention: str) -> None:
    made, how = parse(policy), Attention(0.7, **ATTENTION[attention])
    query, key, value = tokens(20, len(policy))
    ref = reference.start(made, HEADS, GROUPS)
    want = reference.run(ref, query[0], key[0], value[0], made, how)
    state = State.empty(made, key, value, HEADS, how.window)
    slot = torch.zeros(1, state.positions.shape[1], dtype=torch.int64)
    got = stepped(state, slot, query, key, value, made, how)
    torch.testing.assert_close(got[0], want, rtol=0, atol=1e-9)
    for unit, rows in enumerate(ref.rows):
        held = sorted(p for p in state.positions[0, unit].tolist() if p >= 0)
        assert held == sorted(row.position for row in rows)
        if state.scores is not None:
            scores = dict(zip(state.positions[0, unit].tolist(), state.scores[0, unit].tolist(), strict=True))
            assert {row.position: pytest.approx(row.score, abs=1e-9) for row in rows}.items() <= scores.items()


@pytest.mark.parametrize("policy", ["tova:6", "h2o:6", "tova-query-head:5"])
def test_takes_up_where_a_chunk_has_ended(policy: str) -> None:
    made, how = parse(policy), Attention(0.7)
    query, key, value = tokens(30, 3, batch=2)
    one, two = (State.empty(made, key, value, HEADS) for _ in range(2))
    want = recurrence.run(one, query, key, value, made, how, chunk=7)
    start, rest = slice(0, 17), slice(17, 30)
    recurrence.run(two, query[:, :, start], key[:, :, start], value[:, :, start], made, how, chunk=7)
    slot = two.positions.argmin(-1)
    got = stepped(two, slot, query[:, :, rest], key[:, :, rest], value[:, :, rest], made, how)
    torch.testing.assert_close(got, want[:, :, rest], rtol=0, atol=1e-9)
    assert torch.equal(one.positions.sort(-1)[0], two.positions.sort(-1)[0])


@pytest.mark.parametrize("policy", ["tova:16", "h2o:16"])
def test_takes_up_after_padding(policy: str) -> None:
    """What is held may lie behind slots that padding has left empty."""
    made, how = parse(policy), Attention(0.7)
    query, key, value = tokens(24, 9, batch=2)
    real = torch.ones(2, 10, dtype=torch.bool)
    real[1, :6] = False
    one, two = (State.empty(made, key, value, HEADS) for _ in range(2))
    start = [tensor[:, :, :10] for tensor in (query, key, value)]
    for state in (one, two):
        recurrence.run(state, *start, made, how, real)
    slot = two.positions.argmin(-1)
    for t in range(10, 24):
        new = [tensor[:, :, t] for tensor in (query, key, value)]
        want = recurrence.run(one, *(tensor[:, :, None] for tensor in new), made, how)[:, :, 0]
        got = step(*new, two.keys, two.values, two.positions, two.scores, slot, two.seen, made, how)
        two.seen += 1
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    assert torch.equal(one.positions.sort(-1)[0], two.positions.sort(-1)[0])


def test_an_inactive_row_stays_as_it_is() -> None:
    made, how = parse("h2o:6"), Attention(0.7)
    query, key, value = tokens(12, 5, batch=2)
    state = State.empty(made, key, value, HEADS)
    slot = torch.zeros(2, GROUPS, dtype=torch.int64)
    stepped(state, slot, query, key, value, made, how)
    state.seen[1] = -1
    before, where = state.fork().tensors(), slot.clone()
    out = stepped(state, slot, *tokens(3, 6, batch=2), made, how)
    assert out.isfinite().all()
    assert torch.equal(slot[1], where[1])
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor[1], before[name][1]), name
    assert not torch.equal(state.keys[0], before["keys"][0])


def test_slots_are_filled_from_the_lowest_and_none_is_left_at_the_end() -> None:
    made, how = parse("full"), Attention(0.7)
    query, key, value = tokens(5, 7)
    keys, values = (torch.zeros(1, GROUPS, 4, SIZE, dtype=torch.float64) for _ in "kv")
    positions, slot, seen = torch.full((1, 1, 4), -1), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1).long()
    for t, expected in enumerate((1, 2, 3, -1, -1)):
        step(query[:, :, t], key[:, :, t], value[:, :, t], keys, values, positions, None, slot, seen + t, made, how)
        assert slot.item() == expected
    assert positions.tolist() == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("policy", ["tova:6", "h2o:6", "tova-query-head:5", "window+2:6"])
def test_states_that_lie_anywhere(policy: str) -> None:
    """Three of six states, of unequal age, with room between their parts: as each alone, and nobody else is touched."""
    made, how, rows = parse(policy), Attention(0.7), torch.tensor([4, 0, 3])
    query, key, value = tokens(24, 11, batch=6)
    packed = State.empty(made, key, value, HEADS)
    state = replace(packed, **{name: apart(tensor) for name, tensor in packed.tensors().items() if name != "seen"})
    slot, ages = apart(torch.zeros(*state.positions.shape[:2], dtype=torch.int64)), torch.tensor([0, 9, 2])
    alone = [State.empty(made, key[:1], value[:1], HEADS) for _ in rows]
    for i, (row, age) in enumerate(zip(rows.tolist(), ages.tolist(), strict=True)):
        if age:
            recurrence.run(alone[i], *(tensor[row, None, :, :age] for tensor in (query, key, value)), made, how)
            for name in ("keys", "values", "positions", "scores"):
                if getattr(state, name) is not None:
                    getattr(state, name)[row] = getattr(alone[i], name)[0]
            slot[row] = min(age, state.positions.shape[2] - 1)
    others = {name: tensor[[1, 2, 5]].clone() for name, tensor in state.tensors().items()}
    share = state.keys.shape[1] // GROUPS
    for turn in range(10):
        now = ages + turn
        new = [torch.stack([t[row, :, age] for row, age in zip(rows, now, strict=True)]) for t in (query, key, value)]
        new[1:] = [tensor.repeat_interleave(share, 1) for tensor in new[1:]]
        held = (state.keys, state.values, state.positions, state.scores, slot, now)
        got = torch.empty(3, HEADS, SIZE, dtype=torch.float64)
        assert step(*new, *held, made, how, rows, got) is got
        for i, (row, age) in enumerate(zip(rows.tolist(), now.tolist(), strict=True)):
            piece = (tensor[row, None, :, age, None] for tensor in (query, key, value))
            want = recurrence.run(alone[i], *piece, made, how)[0, :, 0]
            torch.testing.assert_close(got[i], want, rtol=0, atol=1e-9)
            assert torch.equal(state.positions[row].sort(-1)[0], alone[i].positions[0].sort(-1)[0])
    assert all(torch.equal(tensor[[1, 2, 5]], others[name]) for name, tensor in state.tensors().items())


def apart(tensor: Tensor) -> Tensor:
    """The same numbers in memory where every row is followed by something else."""
    room = torch.full((len(tensor), tensor[0].numel() + 5), 77, dtype=tensor.dtype)[:, : tensor[0].numel()]
    return room.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.01)])
def test_narrow_numbers(dtype: torch.dtype, tolerance: float) -> None:
    """Outputs of the first steps, while nobody leaves, are right to the dtype's precision."""
    made, how = parse("h2o:14"), Attention(0.7)
    query, key, value = (tensor.to(dtype) for tensor in tokens(13, 8))
    state = State.empty(made, key, value, HEADS)
    got = stepped(state, torch.zeros(1, GROUPS, dtype=torch.int64), query, key, value, made, how)
    exact = reference.start(made, HEADS, GROUPS)
    want = reference.run(exact, *(tensor[0].double() for tensor in (query, key, value)), made, how)
    assert got.dtype == dtype
    torch.testing.assert_close(got[0].double(), want, rtol=0, atol=tolerance)


def test_what_was_never_written_is_never_read(operations: None) -> None:
    """Fresh memory may hold anything; only the compiled step promises more than finite numbers."""
    if os.environ["MSRNN_OPS"] == "eager":
        pytest.skip("plain PyTorch needs finite numbers in empty slots")
    made, how = parse("h2o:6"), Attention(0.7)
    query, key, value = tokens(12, 4)
    clean, dirty = (State.empty(made, key, value, HEADS) for _ in range(2))
    for tensor in (dirty.keys, dirty.values, dirty.scores):
        assert tensor is not None
        tensor.fill_(torch.nan)
    want, got = (
        stepped(state, torch.zeros(1, GROUPS, dtype=torch.int64), query, key, value, made, how)
        for state in (clean, dirty)
    )
    assert torch.equal(want, got)


def test_no_number_stays_no_number() -> None:
    """A model that overflows must be seen to, and the state still has a place for the next token."""
    made, how = parse("tova:6"), Attention(0.7)
    query, key, value = tokens(12, 4)
    query[:, :, 9] = torch.nan
    state = State.empty(made, key, value, HEADS)
    slot = torch.zeros(1, 1, dtype=torch.int64)
    got = stepped(state, slot, query, key, value, made, how)
    assert got[:, :, 9].isnan().all()
    assert got[:, :, 10:].isfinite().all()
    assert (state.positions >= 0).sum() == 6
