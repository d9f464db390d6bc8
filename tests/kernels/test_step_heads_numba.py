"""One token of KV heads with slots of their own, in one parallel region: as every head alone, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msrnn import kernels
from msrnn.core import heads, recurrence
from msrnn.core.attention import Attention
from msrnn.core.slots import Slots
from msrnn.kernels.numba import openmp
from msrnn.kernels.numba import step as numba_step
from msrnn.kernels.torch import step as torch_step
from msrnn.plan import HeadPolicies, parse_layer_policy
from msrnn.policy import Policy
from tests.support.head_slots import (
    Layer,
    alone,
    apart,
    assert_same,
    copy_into,
    copy_of,
    in_blocks,
    put_tokens,
    unequal,
)

KINDS = ("tova-head", "tova-head,momentum=0.7", "h2o", "h2o,first=1", "fade", "window", "blend")
GAIN = ",gain=value_norm"
FORMATS = ("", ",kv=int8", ",kv=k8v4")


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def tokens(
    shape: tuple[int, int, int, int, int],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
    strided: bool = False,
) -> list[Tensor]:
    """A query, key and value. shape: batch, heads, KV heads, head size, value size; `strided`: sizes are not dense."""
    batch, count, stored, size, width = shape
    by = 2 if strided else 1
    shapes = ((count, size), (stored, size), (stored, width))
    whole = [torch.randn(batch, n, by * each, generator=generator, dtype=torch.float64) for n, each in shapes]
    return [new.to(dtype)[..., ::by] for new in whole]


def compare(
    policy: HeadPolicies,
    attention: Attention = Attention(0.4),  # noqa: B008 (frozen)
    share: int = 2,
    *,
    batch: int = 2,
    rows: tuple[int, ...] | None = None,
    sizes: tuple[int, int] = (20, 12),
    dtype: torch.dtype = torch.float64,
    memory: Any = apart,
    steps: int = 5,
    fill: int = 6,
    seed: int = 0,
    strided: bool = False,
) -> Layer:
    """Some steps from `fill` random tokens with the same tables; a row is idle now and then. The kernel's slots."""
    generator = torch.Generator().manual_seed(seed)
    states, stored = batch if rows is None else max(rows) + 2, len(policy.heads)
    one, two = (memory(policy, states, share * stored, sizes, dtype, attention.window) for _ in range(2))
    put_tokens(one, fill, generator)
    copy_into(one, two)
    index = None if rows is None else torch.tensor(rows)
    seen, tables, exact = torch.full((batch,), fill), {}, dtype == torch.float64
    for _ in range(steps):
        idle = torch.rand(batch, generator=generator) < 0.1
        new = tokens((batch, share * stored, stored, *sizes), generator, dtype, strided)
        one, two = (
            tuple(replace(part, rows=index, seen=torch.where(idle, -1, seen)) for part in layer) for layer in (one, two)
        )
        expected = alone(torch_step.step, one, new, policy, attention)
        output = numba_step.step_heads(two, *new, policy.heads, attention, tables)
        assert output is not None
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-9 if exact else 2e-2)
        if exact:
            for ours, theirs in zip(two, one, strict=True):
                assert_same(theirs, ours)
        else:  # a rounding may decide otherwise: both go on from the same
            assert_same_newcomer(one, two)
            copy_into(one, two)
        seen += ~idle
    assert len(tables) == 1
    return two


def assert_same_newcomer(one: Layer, two: Layer) -> None:
    """Keys, values and scales are stored bit for bit alike, whatever leaves."""
    for ours, theirs in zip(two, one, strict=True):
        assert all(map(torch.equal, ours.stored, theirs.stored))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    kind=st.sampled_from(KINDS),
    gain=st.sampled_from(["", GAIN]),
    kv=st.sampled_from(FORMATS),
    capacities=st.lists(st.integers(2, 15), min_size=1, max_size=4),
    share=st.integers(1, 3),
    window=st.sampled_from([None, None, 3, 8]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    batch=st.integers(1, 3),
    pool=st.booleans(),
    memory=st.sampled_from([apart, in_blocks]),
    sizes=st.sampled_from([(4, 4), (5, 3), (17, 8), (64, 64)]),
    fill=st.integers(0, 12),
    strided=st.booleans(),
)
def test_equals_every_head_alone(
    seed: int, kind: str, gain: str, kv: str, capacities: list[int], share: int, window: int | None,
    softcap: float | None, has_sinks: bool, batch: int, pool: bool, memory: Any, sizes: tuple[int, int], fill: int,
    strided: bool,
) -> None:  # fmt: skip
    sinks = torch.linspace(-1, 2, share * len(capacities), dtype=torch.float64) if has_sinks else None
    attention = Attention(0.7, None if kind == "blend" else softcap, window, sinks)
    kv = ",kv=int8" if kv and sizes[1] % 4 else kv  # 4-bit values need a size that 4 divides
    fill = fill if window is None else 0  # what a window leaves is not among random tokens
    rows = tuple(torch.randperm(batch + 1, generator=torch.Generator().manual_seed(seed))[:batch].tolist())
    compare(
        unequal(kind + gain + kv, *capacities), attention, share, batch=batch, rows=rows if pool else None,
        sizes=sizes, memory=memory, steps=8, fill=fill, seed=seed, strided=strided,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", ["h2o", "blend", "fade,gain=value_norm", "h2o,kv=int8", "fade,kv=k8v4"])
def test_other_dtypes(text: str, dtype: torch.dtype) -> None:
    compare(unequal(text, 5, 9, 3), sizes=(16, 8), dtype=dtype, steps=12, fill=3)


@pytest.mark.parametrize(
    "text",
    ["fade:4|tova-head:8", "fade:1|fade:8", "window:4|h2o:8", "h2o:4,gain=value_norm|h2o:8", "blend:4|fade:9|window:2"],
)
def test_heads_may_differ_in_kind(text: str) -> None:
    """One keeps no scores, no gains or no residual."""
    policy = parse_layer_policy(text)
    assert isinstance(policy, HeadPolicies)
    compare(policy, steps=8)


@pytest.mark.parametrize("text", ["fade", "blend", "fade,kv=int8", "h2o,gain=value_norm,kv=k8v4"])
def test_threads_share_the_heads_of_a_batch(threads: int, text: str) -> None:
    """Many more tasks than threads; bit for bit as on one."""
    policy = unequal(text, 9, 30, 4, 17)
    layer = compare(policy, batch=8, steps=12)
    torch.set_num_threads(1)
    for ours, theirs in zip(layer, compare(policy, batch=8, steps=12), strict=True):
        for name, tensor in theirs.tensors().items():
            assert torch.equal(ours.tensors()[name], tensor), name


def test_one_parallel_region_with_the_longest_head_first(monkeypatch: pytest.MonkeyPatch) -> None:
    regions, run = [], openmp.run
    monkeypatch.setattr(openmp, "run", lambda *work: (regions.append(work[2]), run(*work)))
    policy, layer, new = example()
    tables: dict[object, Any] = {}
    for _ in range(4):
        step(layer, new, policy, tables)
    assert regions == [9] * 4, "three rows of three heads"
    (works,) = tables.values()
    assert works.records["slots"].tolist() == [13, 8, 5]
    assert works.records["head"].tolist() == [1, 2, 0]


def example(states: int = 3, text: str = "fade") -> tuple[HeadPolicies, Layer, list[Tensor]]:
    """Heads of 4, 12 and 7, six tokens in them, and the next."""
    policy, generator = unequal(text, 4, 12, 7), torch.Generator().manual_seed(0)
    layer = apart(policy, states, 6, (16, 8), torch.float64)
    put_tokens(layer, 6, generator)
    for one in layer:
        one.seen.fill_(6)
    return policy, layer, tokens((states, 6, 3, 16, 8), generator)


def step(layer: Layer, new: list[Tensor], policy: HeadPolicies, tables: dict[object, Any], **more: Any) -> Tensor:
    attention = more.pop("attention", Attention(0.4))
    output = numba_step.step_heads(layer, *new, policy.heads, attention, tables, **more)
    assert output is not None
    return output


def check_step(
    layer: Layer,
    new: list[Tensor],
    policy: HeadPolicies,
    tables: dict[object, Any],
    attention: Attention = Attention(0.4),  # noqa: B008 (frozen)
) -> None:
    reference = copy_of(layer)
    expected = alone(torch_step.step, reference, new, policy, attention)
    torch.testing.assert_close(step(layer, new, policy, tables, attention=attention), expected)
    for ours, theirs in zip(layer, reference, strict=True):
        assert_same(theirs, ours)


def test_tables_are_not_stale_after_a_move() -> None:
    policy, layer, new = example()
    tables: dict[object, Any] = {}
    step(layer, new, policy, tables)
    before = copy_of(layer)
    check_step(copy_of(layer), new, policy, tables)
    for ours, theirs in zip(layer, before, strict=True):
        assert_same(theirs, ours)


@pytest.mark.parametrize("name", ["keys", "values", "scales", "positions", "scores", "gains", "residual", "next"])
def test_tables_are_not_stale_after_a_move_of_one_tensor(name: str) -> None:
    policy, layer, new = example(text="blend,gain=value_norm,kv=int8")
    tables: dict[object, Any] = {}
    step(layer, new, policy, tables)
    former = getattr(layer[1], name)
    moved = (layer[0], replace(layer[1], **{name: former.clone()}), layer[2])
    before = former.clone()
    check_step(moved, new, policy, tables)
    assert torch.equal(former, before)


def test_tables_are_not_stale_for_other_strides() -> None:
    """The first two of four states, then every second one: at the same address and as many."""
    policy, layer, new = example(4)
    new, tables = [tensor[:2] for tensor in new], {}
    step(tuple(part_of(one, slice(2)) for one in layer), new, policy, tables)
    others = [one.keys[1::2].clone() for one in layer]
    check_step(tuple(part_of(one, slice(None, None, 2)) for one in layer), new, policy, tables)
    assert all(torch.equal(one.keys[1::2], keys) for one, keys in zip(layer, others, strict=True))


def part_of(slots: Slots, states: slice) -> Slots:
    return replace(slots, **{name: rows[states] for name, rows in slots.tensors().items()})


@pytest.mark.parametrize(
    "text, attention",
    [
        ("h2o", Attention(0.4)),
        ("fade", Attention(0.9)),
        ("fade", Attention(0.4, softcap=1.5)),
        ("fade", Attention(0.4, window=20)),
        ("fade", Attention(0.4, sinks=torch.ones(6, dtype=torch.float64))),
    ],
)
def test_tables_are_not_stale_for_another_policy_or_attention(text: str, attention: Attention) -> None:
    _, layer, new = example()
    tables: dict[object, Any] = {}
    for number in range(8):
        for one in layer:
            one.seen.fill_(17 + number)
        use = number % 2
        check_step(layer, new, unequal(text if use else "fade", 4, 12, 7), tables, attention if use else Attention(0.4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_output_goes_where_it_is_wanted(dtype: torch.dtype) -> None:
    policy = unequal("fade", 4, 12, 7)
    one, two = (apart(policy, 3, 6, (16, 8), dtype) for _ in range(2))
    new = tokens((3, 6, 3, 16, 8), torch.Generator().manual_seed(1), dtype)
    out = torch.full((6, 3, 8), torch.nan, dtype=dtype).transpose(0, 1)
    assert step(one, new, policy, {}, out=out) is out
    assert torch.equal(out, step(two, new, policy, {}))


def test_out_of_range_is_idle() -> None:
    """A row that points outside: its output is 0, and the others go on."""
    policy, layer, new = example()
    before, rows = copy_of(layer), torch.tensor([-1, 1, 3])
    output = step(tuple(replace(one, rows=rows) for one in layer), new, policy, {})
    assert not output[0].any()
    assert not output[2].any()
    for ours, theirs in zip(layer, before, strict=True):
        assert torch.equal(ours.keys[[0, 2]], theirs.keys[[0, 2]])
        assert (ours.positions[1] == 6).any()


@pytest.mark.parametrize(
    "text", ["fade:4|fade:8,kv=int8", "fade:4,kv=k8v4|fade:8,kv=int8", "key_norm-head:4|key_norm-head:8"]
)
def test_what_one_kernel_cannot_take_steps_alone(text: str) -> None:
    policy = parse_layer_policy(text)
    assert isinstance(policy, HeadPolicies)
    refuse(policy)


def test_query_heads_with_slots_of_their_own_step_alone() -> None:
    """A policy that decides by age can be of any scope; its slots then hold a key for every query head."""
    policy = HeadPolicies((Policy(3, last=3, scope="query_head"), Policy(5, last=5, scope="query_head")))
    refuse(policy)


def test_float16_steps_alone() -> None:
    refuse(unequal("fade", 3, 5), torch.float16)


def refuse(policy: HeadPolicies, dtype: torch.dtype = torch.float64) -> None:
    """One call does nothing, and `heads.step` steps every head alone."""
    layer, attention = apart(policy, 2, 4, (16, 8), dtype), Attention(0.4)
    new = tokens((2, 4, 2, 16, 8), torch.Generator().manual_seed(0), dtype)
    before = copy_of(layer)
    for _ in range(2):
        assert kernels.step_heads(layer, *new, policy.heads, attention, {}) is None
    for ours, theirs in zip(layer, before, strict=True):
        assert_same(theirs, ours)
    expected = alone(recurrence.step, before, new, policy, attention)
    torch.testing.assert_close(heads.step(heads.HeadSlots(layer), *new, policy, attention), expected)


class Sharded(Attention):
    @property
    def sharded(self) -> bool:
        return True


def test_sharded_attention_and_eager_operations_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, layer, new = example()
    assert kernels.step_heads(layer, *new, policy.heads, Sharded(0.4), {}) is None
    monkeypatch.setenv("MSRNN_OPS", "eager")
    assert kernels.step_heads(layer, *new, policy.heads, Attention(0.4), {}) is None


def test_a_residual_refuses_a_soft_cap() -> None:
    policy, layer, new = example(text="blend")
    with pytest.raises(ValueError, match="a residual needs logits without a soft cap"):
        numba_step.step_heads(layer, *new, policy.heads, Attention(0.4, softcap=2.0), {})
