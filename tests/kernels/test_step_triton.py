"""The Triton step, interpreted on the CPU, equals the plain one over many tokens: slots, scores, gains and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.core.attention import Attention
from msrnn.core.slots import Slots
from msrnn.kernels.torch import step as torch_step
from msrnn.policy import parse_policy
from tests.support.interpreted import INTERPRETED, nan_in_fresh_memory, run_cases

if INTERPRETED:
    from msrnn.kernels.triton import step as triton_step
    from msrnn.kernels.triton.notes import DecisionStream


@pytest.mark.slow
def test_interpreted() -> None:
    run_cases(__file__)


@pytest.fixture(autouse=INTERPRETED)
def fresh_memory() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield
    triton_step._cut.cache_clear()


def compare(
    text: str,
    attention: Attention,
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.float64,
    sizes: tuple[int, int] = (20, 12),
) -> None:
    """shape: batch, heads, KV heads. Both go on from slots that are almost full; a row is idle now and then."""
    policy, (batch, heads, kv_heads) = parse_policy(text), shape
    length, generator = (policy.capacity or 7) + 3, torch.Generator().manual_seed(len(text))
    query = 3 * torch.randn(length, batch, heads, sizes[0], generator=generator, dtype=dtype)
    key, value = (torch.randn(length, batch, kv_heads, n, generator=generator, dtype=dtype) for n in sizes)
    one = Slots.empty(policy, key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), heads, attention.window)
    if policy.capacity is None:  # as few slots as will be needed, and one
        one = replace(one, **{name: getattr(one, name)[:, :, :10].clone() for name in ("keys", "values", "positions")})
    for t in range(length - 4):
        torch_step.step(one, query[t], *one.expand(key[t], value[t]), policy, attention)
        one.seen += 1
    two = one.fork()
    for t in range(length - 4, length):
        seen = torch.where(torch.rand(batch, generator=generator) < 0.1, -1, one.seen)
        new = (query[t], *one.expand(key[t], value[t]))
        expected = torch_step.step(replace(one, seen=seen), *new, policy, attention)
        output = triton_step.step(replace(two, seen=seen), *new, policy, attention)
        one.seen += seen >= 0
        two.seen += seen >= 0
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-9 if dtype == torch.float64 else 2e-3)
        assert_same(one, two)


def assert_same(one: Slots, two: Slots) -> None:
    for name, tensor in one.tensors().items():
        other: Tensor = two.tensors()[name]
        if name == "scores":  # the score of an empty slot means nothing
            tensor, other = (scores.masked_fill(one.positions < 0, 0) for scores in (tensor, other))
        torch.testing.assert_close(
            other, tensor, rtol=0, atol=1e-9 if tensor.dtype == torch.float64 else 1e-5, msg=name
        )


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
    "sinks": {"sinks": torch.tensor([0.5, -1, 3, 0], dtype=torch.float64)},
}
GAINS = (  # two query heads share a KV head, and so its gain
    ("tova:6,gain=value_norm", "plain"),
    ("tova+1:6,last=2,gain=value_norm", "wide window"),
    ("tova:6,momentum=0.5,gain=value_norm", "softcap, sinks"),
    ("h2o:7,gain=value_norm", "softcap, sinks"),
    ("h2o:6,gain=value_norm", "wide window"),
    ("tova-head:5,gain=value_norm", "plain"),
    ("tova-query-head:5,gain=value_norm", "wide window"),
    ("window:5,gain=value_norm", "plain"),
)

FORMATS = tuple(  # two query heads share a KV head, or each has its own
    (f"{text},kv={kv}", kind)
    for kv in ("int8", "k8v4")
    for text, kind in (
        ("tova:6", "plain"),
        ("h2o:7", "softcap, sinks"),
        ("tova-query-head:5,momentum=1.0", "plain"),
        ("tova-head:6,gain=value_norm", "wide window"),
        ("window+2:6", "plain"),
        ("tova-query-head:17", "softcap, sinks"),
    )
)

RESIDUALS = (
    ("blend:7", "plain"),
    ("blend:7", "wide window"),
    ("blend-layer+1:6", "sinks"),
    ("tova-query-head:5,residual=0.9,gain=value_norm", "plain"),
    ("window+2:6,residual=1", "plain"),
    ("blend:6,kv=int8", "sinks"),
    ("blend:6,kv=k8v4", "plain"),
    ("tova-query-head:5,residual=0.5,kv=k8v4", "plain"),
)

PAIRS = [(policy, list(ATTENTION)[(i + j) % 4]) for i, policy in enumerate(POLICIES) for j in range(2)]


@pytest.mark.parametrize("text, kind", [*PAIRS, *GAINS, *FORMATS, *RESIDUALS])
def case_equals_torch(text: str, kind: str) -> None:
    compare(text, Attention(0.4, **ATTENTION[kind]), (2 if kind == "plain" else 1, 4, 2))


def case_a_window_of_one_has_a_single_slot() -> None:
    compare("tova:3", Attention(0.4, window=1), (1, 2, 2))


SCATTERED = (
    "h2o:7",
    "tova-query-head:9",
    "window+2:6",
    "h2o-layer:7,gain=value_norm",
    "h2o:7,kv=int8",
    "tova:7,kv=k8v4",
    "blend:7",
    "blend:7,kv=k8v4",
)


@pytest.mark.parametrize("text", SCATTERED)
def case_scattered_states(text: str) -> None:
    """Two of four states, with gaps between them: as plain PyTorch leaves them, and no other is touched."""
    policy, attention, rows = parse_policy(text), Attention(0.4), torch.tensor([3, 1])
    query, key, value = (torch.randn(12, 2, n, 20, dtype=torch.float64) for n in (4, 2, 2))
    like = key.new_zeros(4, 2, 1, 20)
    one = Slots.empty(policy, like, like, 4)
    two = one._map(with_gaps)
    for t in range(12):
        new, seen = (query[t], *one.expand(key[t], value[t])), torch.full((2,), t)
        expected = torch_step.step(replace(one, rows=rows, seen=seen), *new, policy, attention)
        output = triton_step.step(replace(two, rows=rows, seen=seen), *new, policy, attention)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-9)
        assert_same(one, two)


def with_gaps(tensor: Tensor) -> Tensor:
    """The same numbers in memory where every row is followed by something else."""
    memory = torch.full((len(tensor), tensor[0].numel() + 5), 77, dtype=tensor.dtype)[:, : tensor[0].numel()]
    return memory.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("rows, place", [((1, 4, -1), None), ((0, 1, 1 << 40), None), (None, 8), (None, 1 << 40)])
@pytest.mark.parametrize("text", ["tova:7", "h2o:7,gain=value_norm", "blend:7"])
def case_out_of_range_is_idle(text: str, rows: tuple[int, ...] | None, place: int | None) -> None:
    """A row or a next slot that points outside: its output is 0, nothing outside changes, the others go on."""
    policy, attention = parse_policy(text), Attention(0.4)
    query, key, value = (torch.randn(10, 4, n, 20, dtype=torch.float64) for n in (4, 2, 2))
    states = Slots.empty(policy, key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), 4)
    for t in range(9):
        torch_step.step(states, query[t], key[t], value[t], policy, attention)
        states.seen += 1
    one = states._map(guarded)
    new = [tensor[9] for tensor in (query, key, value)]
    if rows is not None:
        new = [tensor[:3] for tensor in new]
        one = replace(one, rows=torch.tensor(rows), seen=torch.full((3,), 9))
    if place is not None:
        one.next[2] = place
    two = replace(one._map(guarded), rows=one.rows)
    expected = torch_step.step(one, *new, policy, attention)
    output = triton_step.step(two, *new, policy, attention)
    assert not output[2].any()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-9)
    assert_same(one, two)
    for tensor in two.tensors().values():
        memory = tensor._base
        assert memory is not None
        assert (memory[0] == 77).all()
        assert (memory[-1] == 77).all()


def guarded(tensor: Tensor) -> Tensor:
    """The same numbers, between two rows that nobody may write to."""
    memory = torch.full((len(tensor) + 2, *tensor.shape[1:]), 77, dtype=tensor.dtype)
    memory[1:-1] = tensor
    return memory[1:-1]


@pytest.mark.parametrize(
    "text, dtype",
    [("tova:6", torch.float16), ("h2o:20", torch.float32), ("h2o-layer:12,gain=value_norm", torch.float32),
     ("h2o:20,kv=int8", torch.float32), ("tova-head:12,kv=k8v4", torch.float32)],
)  # fmt: skip
def case_low_precision(text: str, dtype: torch.dtype) -> None:
    compare(text, Attention(0.4), (1, 4, 2), dtype)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
@pytest.mark.parametrize("text, sizes", [("tova:40,kv=int8", (64, 64)), ("tova:40,kv=k8v4", (32, 128))])
def case_codes_fill_their_tiles(text: str, sizes: tuple[int, int], heads: tuple[int, int]) -> None:
    """Heads as large as their tiles, groups of 32, more query heads than a power of 2; in float32, as on a GPU."""
    compare(text, Attention(0.1), (1, *heads), torch.float32, sizes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
@pytest.mark.parametrize("kv", ["int8", "k8v4"])
def case_codes_in_a_model_of_16_bits(kv: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Against float64 over the same codes: no error but the output's own rounding."""
    policy, attention, random = parse_policy(f"tova:40,kv={kv}"), Attention(0.1), torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(45, 2, n, 32, generator=random).to(dtype) for n in (heads[0], heads[1], heads[1]))
    slots = Slots.empty(policy, key[:1].permute(1, 2, 0, 3), value[:1].permute(1, 2, 0, 3), heads[0])
    for t in range(45):
        wide, before = [x[t].double() for x in (query, key, value)], slots.fork()
        expected = torch_step.step(before, *wide, policy, attention)
        if t >= 42:
            output = triton_step.step(slots, query[t], key[t], value[t], policy, attention)
            torch.testing.assert_close(output.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
            assert_same(before, slots)
        slots = before
        slots.seen += 1


@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("kv", ["int8", "k8v4"])
def case_nan_is_passed_on(kv: str, part: str) -> None:
    """A number that is none, in one head, spoils that head's outputs for as long as it is held, as in PyTorch."""
    policy, attention = parse_policy(f"tova-head:6,kv={kv}"), Attention(0.4)
    tokens = {name: torch.randn(6, 1, 2, 8, dtype=torch.float64) for name in ("query", "key", "value")}
    tokens[part][3, 0, 1, 2] = torch.nan
    one = Slots.empty(policy, tokens["key"][:1].permute(1, 2, 0, 3), tokens["value"][:1].permute(1, 2, 0, 3), 2)
    two = one.fork()
    for t in range(6):
        new = [x[t] for x in tokens.values()]
        expected = torch_step.step(one, *new, policy, attention)
        output = triton_step.step(two, *new, policy, attention)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-9, equal_nan=True)
        one.seen += 1
        two.seen += 1


@pytest.mark.parametrize("kv", ["int8", "k8v4"])
def case_scales_are_rounded_through_float32(kv: str) -> None:
    """As PyTorch rounds float64: a number a little above the middle of two float16 is in the middle as float32."""
    policy, attention = parse_policy(f"tova:3,kv={kv}"), Attention(0.4)
    number = 1 + 2**-11 + 2**-40
    key, query = torch.full((2, 1, 1, 8), 127 * number, dtype=torch.float64)
    value = torch.linspace(number, 3, 8, dtype=torch.float64).view(1, 1, 8)
    one = Slots.empty(policy, key[:, :, None], value[:, :, None], 1)
    two = one.fork()
    torch_step.step(one, query, key, value, policy, attention)
    triton_step.step(two, query, key, value, policy, attention)
    assert 1.0 in one.scales
    assert_same(one, two)


def case_an_odd_number_of_codes() -> None:
    """Values that cannot be read in pairs are left to PyTorch."""
    compare("tova:6,kv=int8", Attention(0.4), (1, 2, 2), sizes=(20, 11))


@pytest.mark.parametrize(
    "text, heads",
    [("tova:40", (3, 1)), ("h2o:18", (2, 2)), ("window:34", (2, 2)), ("tova:40,gain=value_norm", (4, 2)),
     ("tova:40,kv=int8", (2, 2)), ("tova:40,kv=k8v4", (3, 1))],
)  # fmt: skip
def case_the_slots_of_a_head_are_split(text: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_step, "_FEW", (32, 4, 8))
    monkeypatch.setattr(triton_step, "_GROUPED", (32, 4, 8))
    monkeypatch.setattr(triton_step, "_FEW_CODES", (16, 4, 2, 8))
    compare(text, Attention(0.4), (1, *heads))


@pytest.mark.parametrize(
    "text, heads",
    [("tova:40", (1, 1)), ("tova-head:17", (4, 2)), ("h2o:40,kv=int8", (2, 2)), ("tova:65,kv=int8", (4, 2)),
     ("tova:65,kv=k8v4", (1, 1)), ("tova:65,kv=k8v4", (2, 1))],
)  # fmt: skip
def case_one_program_per_head(text: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_step, "_ENOUGH", 0)
    monkeypatch.setattr(triton_step, "_ENOUGH_CODES", 0)
    for kind in ("_GROUPED", "_MANY"):
        monkeypatch.setattr(triton_step, kind, (32, 4, 0))
    compare(text, Attention(0.4), (1, *heads))


@pytest.mark.parametrize(
    "text, notes", [("tova:20", 2), ("h2o:18", 2), ("h2o:18,gain=value_norm", 2), ("window:17", 0)]
)
def case_decision_stream(text: str, notes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches instead of one, and notes that are used again; not where age decides."""
    monkeypatch.setattr(triton_step, "_FEW", (32, 4, 8))
    stream = DecisionStream(torch.device("cpu"))
    with stream:
        compare(text, Attention(0.4), (1, 2, 2))
    assert len(stream.notes) == notes


def case_of_equal_scores_the_oldest_leaves() -> None:
    policy, attention = parse_policy("tova:5"), Attention(0.0)
    zeros = torch.zeros(1, 1, 16, dtype=torch.float64)
    slots = Slots.empty(policy, zeros[:, :, None], zeros[:, :, None], 1)
    for _ in range(9):
        triton_step.step(slots, zeros, zeros, zeros, policy, attention)
        slots.seen += 1
    assert sorted(slots.positions.flatten().tolist()) == [-1, 4, 5, 6, 7, 8]


def case_a_part_of_a_buffer_is_refused() -> None:
    policy, new = parse_policy("tova:5"), torch.zeros(2, 2, 16)
    slots = Slots.empty(policy, new[:, :, None], new[:, :, None], 2)
    slots.keys = torch.zeros(2, 2, 9, 16)[:, :, :6]
    with pytest.raises(ValueError, match="contiguous"):
        triton_step.step(slots, new, new, new, policy, Attention(1.0))
