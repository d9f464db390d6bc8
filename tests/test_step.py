"""One step in place, in plain PyTorch, equals the definition: every policy, scope, window, sinks, raggedness."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn import recurrence, reference
from msrnn.attention import Attention
from msrnn.ops.step import step
from msrnn.policy import Policy, parse
from msrnn.state import State

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
