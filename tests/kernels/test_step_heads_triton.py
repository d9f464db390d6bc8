"""One token of KV heads with slots of their own, in two launches: as every head alone, in plain PyTorch and Triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from msrnn.core.attention import Attention
from msrnn.kernels.torch import step as torch_step
from msrnn.plan import HeadPolicies, parse_layer_policy
from tests.support.head_slots import alone, apart, assert_same, copy_into, copy_of, in_blocks, put_tokens, unequal
from tests.support.interpreted import INTERPRETED, nan_in_fresh_memory, run_cases

if INTERPRETED:
    from msrnn.kernels.triton import step as triton_step
    from msrnn.kernels.triton.notes import DecisionStream
    from msrnn.kernels.triton.ragged import ragged_of


@pytest.mark.slow
def test_interpreted() -> None:
    run_cases(__file__)


@pytest.fixture(autouse=INTERPRETED)
def fresh_memory() -> Iterator[None]:
    with nan_in_fresh_memory():
        yield
    triton_step._cut.cache_clear()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched."""
    names: list[str] = []
    for name in ("attend", "finish"):
        monkeypatch.setattr(triton_step, name, Counted(name, getattr(triton_step, name), names))
    return names


class Counted:
    def __init__(self, name: str, kernel: Any, names: list[str]) -> None:
        self.name, self.kernel, self.names = name, kernel, names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.names.append(self.name)
        return self.kernel[grid]


def compare(
    policy: HeadPolicies,
    attention: Attention = Attention(0.4),  # noqa: B008 (frozen)
    query_heads: int | None = None,
    *,
    batch: int = 2,
    rows: tuple[int, ...] | None = None,
    sizes: tuple[int, int] = (20, 12),
    dtype: torch.dtype = torch.float64,
    memory: Any = apart,
    steps: int = 4,
    every: int = 3,
    fill: int = 6,
) -> None:
    """From empty slots, or `fill` random tokens, over `steps` tokens; a row is idle now and then."""
    count, generator = query_heads or len(policy.heads), torch.Generator().manual_seed(steps)
    stored = len(policy.heads)
    widths = ((count, sizes[0]), (stored, sizes[0]), (stored, sizes[1]))
    tokens = [torch.randn(steps, batch, *n, generator=generator, dtype=dtype) for n in widths]
    states = batch if rows is None else max(rows) + 2
    one = memory(policy, states, count, sizes, dtype)
    put_tokens(one, fill, generator)
    index = None if rows is None else torch.tensor(rows)
    seen, tables = torch.full((batch,), fill), {}
    atol = 1e-9 if dtype == torch.float64 else 2e-3
    two = one if memory is apart else copy_into(one, memory(policy, states, count, sizes, dtype))
    two, three = (copy_of(one) if memory is apart else two), copy_of(one)
    for t in range(steps):
        idle = torch.rand(batch, generator=generator) < 0.1
        now, new = torch.where(idle, -1, seen), [tensor[t] for tensor in tokens]
        one, two, three = (tuple(replace(s, rows=index, seen=now) for s in layer) for layer in (one, two, three))
        expected = alone(torch_step.step, one, new, policy, attention)
        output = triton_step.step_heads(two, *new, policy.heads, attention, tables)
        assert output is not None
        torch.testing.assert_close(output, expected, rtol=0, atol=atol)
        if t % every == 0:
            single = alone(triton_step.step, three, new, policy, attention)
            torch.testing.assert_close(output, single, rtol=0, atol=atol / 10)
        for ours, theirs in zip(two, one, strict=True):
            assert_same(theirs, ours)
        three = copy_of(two)
        seen += ~idle
    assert len(tables) == 1


SINKS = torch.tensor([0.5, -1, 3, 0], dtype=torch.float64)
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fade", {}),
    ("h2o", {"softcap": 2.0, "sinks": SINKS}),
    ("tova-head", {}),
    ("tova-head,momentum=0.7", {"window": 12}),
    ("window", {}),
    ("fade,gain=value_norm", {}),
    ("h2o,gain=value_norm", {"sinks": SINKS}),
    ("fade,kv=int8", {}),
    ("h2o,kv=k8v4", {"sinks": SINKS}),
    ("tova-head,kv=k8v4,gain=value_norm", {"window": 12}),
)


@pytest.mark.parametrize("text, extra", KINDS)
def case_two_query_heads_share_a_kv_head(text: str, extra: dict[str, Any]) -> None:
    compare(unequal(text, 4, 9), Attention(0.4, **extra), 4)


@pytest.mark.parametrize("text", ["fade", "h2o,kv=int8", "tova-head,kv=k8v4"])
def case_every_query_head_has_a_kv_head(text: str) -> None:
    compare(unequal(text, 6, 3, 8))


@pytest.mark.parametrize("memory", [apart, in_blocks])
@pytest.mark.parametrize("text", ["fade", "h2o,gain=value_norm,kv=int8"])
def case_rows_of_a_pool(text: str, memory: Any) -> None:
    """Some of many states, in any order; no other is touched, as `assert_same` looks at them all."""
    compare(unequal(text, 4, 8), Attention(0.4), 4, rows=(3, 0, 1), batch=3, memory=memory)


@pytest.mark.parametrize("text, query_heads", [("fade", 2), ("tova-head,gain=value_norm", 4)])
def case_very_unequal(text: str, query_heads: int, launches: list[str]) -> None:
    """A head of 4 beside one of 700, in several shares; two launches a step."""
    policy = unequal(text, 4, 700)
    slots = apart(policy, 1, query_heads, (16, 16), torch.float32)
    assert triton_step._cut(1, query_heads, 2, (701, 5), (16, 16), None, slots[0].keys.device)["SPLITS"] > 1
    compare(policy, query_heads=query_heads, batch=1, sizes=(16, 16), dtype=torch.float32, steps=4, every=9, fill=698)
    assert launches.count("attend") == 4 + 2  # two heads alone, once
    assert launches.count("finish") == 4 + 2


@pytest.mark.parametrize(
    "text, query_heads", [("fade", 3), ("fade", 6), ("h2o,kv=int8", 6), ("tova-head,kv=k8v4", 3), ("window", 3)]
)
def case_shares(text: str, query_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small shares, some of them empty."""
    for kind in ("_FEW", "_GROUPED"):
        monkeypatch.setattr(triton_step, kind, (32, 4, 8))
    monkeypatch.setattr(triton_step, "_FEW_CODES", (16, 4, 2, 8))
    compare(unequal(text, 40, 3, 17), Attention(0.4), query_heads, batch=1, steps=3, fill=39)


@pytest.mark.parametrize("longest", [1, 2])
@pytest.mark.parametrize("text", ["fade", "h2o,kv=int8"])
def case_many_heads(text: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program per head, or a second one for what a head has beyond the mean."""
    monkeypatch.setattr(triton_step, "_ENOUGH", 0)
    monkeypatch.setattr(triton_step, "_ENOUGH_CODES", 0)
    monkeypatch.setattr(triton_step, "_LONGEST", longest)
    monkeypatch.setattr(triton_step, "_MANY", (32, 4, 0))
    compare(unequal(text, 64, 34), sizes=(16, 16), batch=1, steps=3, fill=63)


@pytest.mark.parametrize("text, notes", [("fade", 2), ("h2o,gain=value_norm", 2), ("window", 0)])
def case_decision_stream(text: str, notes: int) -> None:
    stream = DecisionStream(torch.device("cpu"))
    with stream:
        compare(unequal(text, 4, 9), query_heads=4, every=99)
    kept = [key for key in stream.notes if key[1][1] == 4]  # of all heads, not of the one that steps alone
    assert len(kept) == notes


def case_low_precision() -> None:
    compare(unequal("tova-head", 5, 9), query_heads=4, dtype=torch.float16)
    compare(unequal("fade", 5, 9), query_heads=4, dtype=torch.float32)


def case_from_nothing_to_full() -> None:
    compare(unequal("fade", 3, 9, 5), batch=1, fill=0, steps=12, every=6)


def case_out_of_range_is_idle() -> None:
    """A row that points outside: its output is 0, and the others go on."""
    policy, attention = unequal("fade", 4, 8), Attention(0.4)
    layer = apart(policy, 3, 2, (16, 16), torch.float64)
    before = copy_of(layer)
    new = [torch.randn(3, 2, 16, dtype=torch.float64) for _ in range(3)]
    rows, seen = torch.tensor([-1, 1, 3]), torch.zeros(3, dtype=torch.int64)
    output = triton_step.step_heads(
        tuple(replace(one, rows=rows, seen=seen) for one in layer), *new, policy.heads, attention, {}
    )
    assert output is not None
    assert not output[0].any()
    assert not output[2].any()
    torch.testing.assert_close(output[1], new[2][1])  # the first token sees itself
    for ours, theirs in zip(layer, before, strict=True):
        assert torch.equal(ours.keys[[0, 2]], theirs.keys[[0, 2]])
        assert ours.positions[1, 0, 0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "fade:4|tova-head:8",
        "fade:1|fade:8",
        "fade:4|fade:8,kv=int8",
        "window:4|h2o:8",
        "h2o:4,gain=value_norm|h2o:8",
        "key_norm-head:4|key_norm-head:8",
    ],
)
def case_heads_of_other_kinds_step_alone(text: str) -> None:
    policy = parse_layer_policy(text)
    assert isinstance(policy, HeadPolicies)
    layer = apart(policy, 1, 2, (16, 16), torch.float32)
    assert ragged_of(layer, policy.heads, None, {}) is None


def case_the_table_is_made_once() -> None:
    policy, tables = unequal("fade", 4, 8), {}
    layer = apart(policy, 1, 2, (16, 16), torch.float32)
    first = ragged_of(layer, policy.heads, None, tables)
    assert first is not None
    assert first.lengths == (9, 5)
    assert first.align == 16
    assert ragged_of(tuple(replace(one, fed=3) for one in layer), policy.heads, None, tables) is first
    assert ragged_of(copy_of(layer), policy.heads, None, tables) is not first
