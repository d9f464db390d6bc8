"""One step in place, in plain PyTorch and compiled, equals the definition: every policy, scope, window, sinks."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.core import reference
from msrnn.core.attention import Attention
from msrnn.core.recurrence import read
from msrnn.core.slots import Slots, gain_of
from msrnn.kernels import step
from msrnn.policy import Policy, parse_policy
from tests.support.residual import check_residual

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
    "tova:6,gain=value_norm",
    "h2o:6,gain=value_norm",
    "tova-query-head:5,gain=value_norm",
    "key_difference:6",
    "tova:6,kv=int8",
    "tova:6,kv=k8v4",
    "window+2:6,kv=k8v4",
    "h2o:6,kv=int8",
    "tova:6,momentum=0.5,gain=value_norm,kv=k8v4",
    "tova-query-head:5,gain=value_norm,kv=int8",
    "h2o-layer+1:6,kv=k8v4",
    "blend:6",
    "blend-layer+1:6,kv=int8",
    "blend:6,kv=k8v4",
    "tova-query-head:5,residual=0.5,gain=value_norm",
    "tova:1,residual=1",
    "window+2:6,residual=0.9",
    "key_difference:6,residual=0.9",
)
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, sinks": {"softcap": 2.0, "sinks": torch.tensor([0.5, -1, 3, 0], dtype=torch.float64)},
    "window": {"window": 5},
    "narrow window": {"window": 3},
    "wide window": {"window": 9},
}
HEADS, KV_HEADS, SIZE = 4, 2, 4


@pytest.fixture(autouse=True, params=["eager", "compiled"])
def operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSRNN_OPS", request.param)


def tokens(length: int, seed: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, H, T, D], key and value [B, G, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return 3 * query, key, value


def run_steps(slots: Slots, query: Tensor, key: Tensor, value: Tensor, policy: Policy, attention: Attention) -> Tensor:
    """Token by token -> [B, H, T, V]."""
    key, value = slots.expand(key, value)
    outputs = []
    for t in range(query.shape[2]):
        outputs.append(step(slots, query[:, :, t], key[:, :, t], value[:, :, t], policy, attention))
        slots.seen += slots.seen >= 0
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("kind", ATTENTION)
def test_equals_the_definition(text: str, kind: str) -> None:
    policy, attention = parse_policy(text), Attention(0.7, **ATTENTION[kind])
    attention = attention if policy.residual is None else replace(attention, softcap=None)
    query, key, value = tokens(20, len(text))
    definition = reference.start(policy, HEADS, KV_HEADS)
    expected = reference.run(definition, query[0], key[0], value[0], policy, attention)
    slots = Slots.empty(policy, key, value, HEADS, attention.window)
    output = run_steps(slots, query, key, value, policy, attention)
    torch.testing.assert_close(output[0], expected, rtol=0, atol=1e-9)
    for unit, rows in enumerate(definition.rows):
        positions = slots.positions[0, unit].tolist()
        assert sorted(p for p in positions if p >= 0) == sorted(row.position for row in rows)
        if slots.scores is not None:
            scores = dict(zip(positions, slots.scores[0, unit].tolist(), strict=True))
            assert {row.position: pytest.approx(row.score, abs=1e-9) for row in rows}.items() <= scores.items()
        if slots.residual is not None:
            check_residual(slots.residual[0], definition.residuals[unit], unit, len(definition.rows))
    if slots.gains is not None:
        held = slots.positions.repeat_interleave(slots.gains.shape[1] // slots.positions.shape[1], 1) >= 0
        values = slots.decoded(torch.float64)[1]
        torch.testing.assert_close(slots.gains[held], gain_of(values, torch.float64)[held])


@pytest.mark.parametrize(
    "text",
    ["tova:6", "h2o:6", "tova-query-head:5", "h2o:6,gain=value_norm", "h2o:6,kv=k8v4", "blend:6", "blend:6,kv=int8"],
)
def test_continues_after_a_chunk(text: str) -> None:
    policy, attention = parse_policy(text), Attention(0.7)
    query, key, value = tokens(30, 3, batch=2)
    one, two = (Slots.empty(policy, key, value, HEADS) for _ in range(2))
    expected = read(one, query, key, value, policy, attention, chunk=7)
    start, rest = slice(0, 17), slice(17, 30)
    read(two, query[:, :, start], key[:, :, start], value[:, :, start], policy, attention, chunk=7)
    output = run_steps(two, query[:, :, rest], key[:, :, rest], value[:, :, rest], policy, attention)
    torch.testing.assert_close(output, expected[:, :, rest], rtol=0, atol=1e-9)
    assert torch.equal(one.positions.sort(-1)[0], two.positions.sort(-1)[0])


@pytest.mark.parametrize("text", ["tova:16", "h2o:16", "blend:8"])
def test_continues_after_padding(text: str) -> None:
    """Held tokens may lie behind slots that padding has left empty."""
    policy, attention = parse_policy(text), Attention(0.7)
    query, key, value = tokens(24, 9, batch=2)
    real = torch.ones(2, 24, dtype=torch.bool)
    real[1, :6] = False
    one, two = (Slots.empty(policy, key, value, HEADS) for _ in range(2))
    expected = read(one, query, key, value, policy, attention, real)
    start, rest = ([tensor[:, :, part] for tensor in (query, key, value)] for part in (slice(0, 10), slice(10, 24)))
    read(two, *start, policy, attention, real[:, :10])
    output = run_steps(two, *rest, policy, attention)
    torch.testing.assert_close(output, expected[:, :, 10:], rtol=0, atol=1e-9)
    assert torch.equal(one.positions.sort(-1)[0], two.positions.sort(-1)[0])


@pytest.mark.parametrize("text", ["h2o:6,gain=value_norm", "tova:6,kv=int8", "tova:6,kv=k8v4", "blend:6"])
def test_an_idle_row_stays_as_it_is(text: str) -> None:
    policy, attention = parse_policy(text), Attention(0.7)
    query, key, value = tokens(12, 5, batch=2)
    slots = Slots.empty(policy, key, value, HEADS)
    run_steps(slots, query, key, value, policy, attention)
    slots.seen[1] = -1
    before = slots.fork().tensors()
    output = run_steps(slots, *tokens(3, 6, batch=2), policy, attention)
    assert not output[1].any()
    for name, tensor in slots.tensors().items():
        assert torch.equal(tensor[1], before[name][1]), name
    assert not torch.equal(slots.keys[0], before["keys"][0])


def test_slots_are_filled_from_the_lowest_until_none_is_left() -> None:
    policy, attention = parse_policy("full"), Attention(0.7)
    query, key, value = tokens(5, 7)
    slots = Slots.empty(policy, key, value, HEADS)
    slots = replace(slots, **{name: getattr(slots, name)[:, :, :4].clone() for name in ("keys", "values", "positions")})
    for t, expected in enumerate((1, 2, 3, -1, -1)):
        step(slots, query[:, :, t], key[:, :, t], value[:, :, t], policy, attention)
        slots.seen += 1
        assert slots.next.item() == expected
    assert slots.positions.tolist() == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("place", [7, 1 << 40, -2])
@pytest.mark.parametrize(
    "text", ["tova:6", "h2o:6,gain=value_norm", "tova-query-head:6", "window+2:6", "tova:6,kv=k8v4"]
)
def test_a_next_slot_out_of_range_makes_a_row_idle(text: str, place: int) -> None:
    """As from a damaged state: nothing is written, wherever it points, and the other row goes on."""
    policy, attention = parse_policy(text), Attention(0.7)
    query, key, value = tokens(9, 5, batch=2)
    slots = Slots.empty(policy, key, value, HEADS)
    run_steps(slots, query, key, value, policy, attention)
    slots.next[1] = place
    before, alone = slots.fork().tensors(), slots.select(torch.tensor([0]))
    new = tokens(3, 6, batch=2)
    output = run_steps(slots, *new, policy, attention)
    assert not output[1].any()
    for name, tensor in slots.tensors().items():
        if name != "seen":
            assert torch.equal(tensor[1], before[name][1]), name
    expected = run_steps(alone, *(tensor[:1] for tensor in new), policy, attention)
    torch.testing.assert_close(output[:1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [(1, 6, 0), (-1, 0, 1), (0, 1 << 40, 1), (9, -7, 8)])
@pytest.mark.parametrize(
    "text", ["tova:6", "h2o:6,gain=value_norm", "tova-query-head:6", "window+2:6", "tova:6,kv=k8v4"]
)
def test_a_row_out_of_range_is_idle(text: str, rows: tuple[int, ...]) -> None:
    """A sequence whose number there is not among the states: the others go on, and no other state changes."""
    policy, attention = parse_policy(text), Attention(0.7)
    query, key, value = tokens(9, 5, batch=6)
    states = Slots.empty(policy, key, value, HEADS)
    run_steps(states, query, key, value, policy, attention)
    before = states.fork()
    new = [tensor[:, :, 0] for tensor in tokens(1, 6, batch=3)]
    new[1:] = states.expand(*new[1:])
    slots = replace(states, rows=torch.tensor(rows), seen=torch.full((3,), 9))
    output = step(slots, *new, policy, attention)
    for i, row in enumerate(rows):
        if not 0 <= row < 6:
            assert not output[i].any()
            continue
        alone = before.select(torch.tensor([row]))
        expected = step(alone, *(tensor[i : i + 1] for tensor in new), policy, attention)
        torch.testing.assert_close(output[i : i + 1], expected, rtol=0, atol=1e-12)
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(states.tensors()[name][row], tensor[0], rtol=0, atol=1e-12)
    others = [row for row in range(6) if row not in rows]
    for name, tensor in states.tensors().items():
        assert torch.equal(tensor[others], before.tensors()[name][others]), name


@pytest.mark.parametrize(
    "text",
    ["tova:6", "h2o:6", "tova-query-head:5", "window+2:6", "h2o:6,gain=value_norm", "h2o:6,kv=int8", "tova:6,kv=k8v4"],
)
def test_scattered_states(text: str) -> None:
    """Three of six states, of unequal length, with gaps between their parts: as each alone, no other is touched."""
    policy, attention, rows = parse_policy(text), Attention(0.7), [4, 0, 3]
    query, key, value = tokens(24, 11, batch=6)
    packed = Slots.empty(policy, key, value, HEADS)
    states = replace(packed, **{name: with_gaps(tensor) for name, tensor in packed.tensors().items() if name != "seen"})
    lengths = torch.tensor([0, 9, 2])
    alone = [Slots.empty(policy, key[:1], value[:1], HEADS) for _ in rows]
    for i, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        if length:
            read(alone[i], *(tensor[row, None, :, :length] for tensor in (query, key, value)), policy, attention)
            for name, tensor in alone[i].tensors().items():
                getattr(states, name)[row] = tensor[0]
    others = {name: tensor[[1, 2, 5]].clone() for name, tensor in states.tensors().items()}
    for turn in range(10):
        now = lengths + turn
        new = [torch.stack([t[row, :, at] for row, at in zip(rows, now, strict=True)]) for t in (query, key, value)]
        new[1:] = states.expand(*new[1:])
        slots, output = replace(states, rows=torch.tensor(rows), seen=now), torch.empty_like(new[0])
        assert step(slots, *new, policy, attention, output) is output
        for i, (row, at) in enumerate(zip(rows, now.tolist(), strict=True)):
            token = (tensor[row, None, :, at, None] for tensor in (query, key, value))
            torch.testing.assert_close(output[i], read(alone[i], *token, policy, attention)[0, :, 0], rtol=0, atol=1e-9)
            assert torch.equal(states.positions[row].sort(-1)[0], alone[i].positions[0].sort(-1)[0])
    assert all(torch.equal(tensor[[1, 2, 5]], others[name]) for name, tensor in states.tensors().items())


def with_gaps(tensor: Tensor) -> Tensor:
    """The same numbers in memory where every row is followed by something else."""
    memory = torch.full((len(tensor), tensor[0].numel() + 5), 77, dtype=tensor.dtype)[:, : tensor[0].numel()]
    return memory.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.01)])
@pytest.mark.parametrize(
    "text", ["h2o:14", "h2o:14,gain=value_norm", "h2o:14,gain=value_norm,kv=int8", "h2o:14,gain=value_norm,kv=k8v4"]
)
def test_low_precision(text: str, dtype: torch.dtype, tolerance: float) -> None:
    """Outputs of the first steps, while nothing leaves, are right to the dtype's precision."""
    policy, attention = parse_policy(text), Attention(0.7)
    query, key, value = (tensor.to(dtype) for tensor in tokens(13, 8))
    slots = Slots.empty(policy, key, value, HEADS)
    output = run_steps(slots, query, key, value, policy, attention)
    definition = reference.start(policy, HEADS, KV_HEADS)
    exact = (tensor[0].double() for tensor in (query, key, value))
    expected = reference.run(definition, *exact, policy, attention)
    assert output.dtype == dtype
    torch.testing.assert_close(output[0].double(), expected, rtol=0, atol=tolerance)
    if slots.gains is not None:
        exact_gains = gain_of(slots.decoded(dtype, 13)[1].double(), torch.float64)
        torch.testing.assert_close(slots.gains[:, :, :13].double(), exact_gains, rtol=1e-6, atol=0)


@pytest.mark.parametrize("text", ["h2o:6", "h2o:6,gain=value_norm", "h2o:6,kv=int8", "h2o:6,kv=k8v4"])
def test_memory_that_was_never_written_is_never_read(operations: None, text: str) -> None:
    """Fresh memory may hold anything; only the compiled step promises more than finite numbers."""
    if os.environ["MSRNN_OPS"] == "eager":
        pytest.skip("plain PyTorch needs finite numbers in empty slots")
    policy, attention = parse_policy(text), Attention(0.7)
    query, key, value = tokens(12, 4)
    clean, dirty = (Slots.empty(policy, key, value, HEADS) for _ in range(2))
    for name in ("keys", "values", "scales", "scores", "gains"):
        tensor = getattr(dirty, name)
        if tensor is not None:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
    expected, output = (run_steps(slots, query, key, value, policy, attention) for slots in (clean, dirty))
    assert torch.equal(expected, output)


def test_a_query_of_nan_shows_in_the_output() -> None:
    """A model that overflows must be noticed, and the state still has a slot for the next token."""
    policy, attention = parse_policy("tova:6"), Attention(0.7)
    query, key, value = tokens(12, 4)
    query[:, :, 9] = torch.nan
    slots = Slots.empty(policy, key, value, HEADS)
    output = run_steps(slots, query, key, value, policy, attention)
    assert output[:, :, 9].isnan().all()
    assert output[:, :, 10:].isfinite().all()
    assert (slots.positions >= 0).sum() == 6


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kv", ["int8", "k8v4"])
def test_a_value_that_is_no_number_shows_in_the_output(kv: str, number: float) -> None:
    """Codes of fewer bits have no NaN; their scales do. The other head goes on."""
    policy, attention = parse_policy(f"tova:6,kv={kv}"), Attention(0.7)
    query, key, value = tokens(9, 4)
    value[:, 0, 8, 1] = number
    slots = Slots.empty(policy, key, value, HEADS)
    output = run_steps(slots, query, key, value, policy, attention)
    assert not output[:, : HEADS // KV_HEADS, 8].isfinite().all(-1).any()
    assert output[:, HEADS // KV_HEADS :, 8].isfinite().all()
