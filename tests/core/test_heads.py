"""A layer whose KV heads have budgets of their own: each is what the definition makes of that head alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msrnn.core import head_groups, heads, reference
from msrnn.core.attention import Attention
from msrnn.core.slots import Slots
from msrnn.plan import HeadPolicies, Plan, parse_layer_policy, per_layer
from msrnn.policy import parse_policy

KINDS = ("fade", "h2o", "tova-head", "fade,kv=int8", "h2o,gain=value_norm", "window")


def tensors(length: int, batch: int, query_heads: int, kv_heads: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, n, length, 4, generator=generator, dtype=torch.float64)
        for n in (query_heads, kv_heads, kv_heads)
    )


def by_reference(policy: HeadPolicies, tokens: tuple[torch.Tensor, ...], attention: Attention) -> torch.Tensor:
    """Every KV head of row 0 through the definition, alone."""
    query, key, value = (tensor[0] for tensor in tokens)
    share, outputs = len(query) // len(key), []
    for g, one in enumerate(policy.heads):
        own, queries = slice(g, g + 1), slice(g * share, (g + 1) * share)
        sinks = None if attention.sinks is None else attention.sinks[queries]
        alone = Attention(attention.scale, attention.softcap, attention.window, sinks)
        state = reference.start(one, share, 1)
        outputs.append(reference.run(state, query[queries], key[own], value[own], one, alone))
    return torch.cat(outputs)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    capacities=st.lists(st.integers(4, 12), min_size=3, max_size=3),
    length=st.integers(1, 40),
    chunk=st.integers(1, 17),
    cut=st.integers(0, 40),
    sinks=st.booleans(),
    window=st.sampled_from([None, None, 7]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_definition_for_every_head(kind, capacities, length, chunk, cut, sinks, window, seed) -> None:
    policy = per_layer(kind, [capacities])[0]
    assert isinstance(policy, HeadPolicies)
    tokens = tensors(length, 1, 6, 3, seed)
    attention = Attention(0.5, None, window, torch.linspace(-1, 1, 6, dtype=torch.float64) if sinks else None)
    slots = heads.empty_slots(policy, *tokens[1:], 6, window)
    pieces = [part for part in (slice(0, min(cut, length)), slice(min(cut, length), length)) if part.start < part.stop]
    outputs = [heads.read(slots, *(t[:, :, p] for t in tokens), policy, attention, None, chunk) for p in pieces]
    expected = by_reference(policy, tokens, attention)
    tolerance = 1e-9 if policy.heads[0].kv is None else 1e-6
    torch.testing.assert_close(torch.cat(outputs, 2)[0], expected, atol=tolerance, rtol=tolerance)
    assert all(int(held) <= size for held, size in zip(slots.held[0], capacities, strict=True))


@settings(max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    capacities=st.lists(st.integers(4, 12), min_size=3, max_size=3),
    length=st.integers(2, 40),
    chunk=st.integers(1, 17),
    cut=st.integers(0, 40),
    sinks=st.booleans(),
    window=st.sampled_from([None, 7, 15]),
    seed=st.integers(0, 2**16),
)
def test_heads_read_together_equal_heads_read_alone(kind, capacities, length, chunk, cut, sinks, window, seed) -> None:
    """As on a GPU: slots side by side, in one read. A step after it finds every head's slots in order."""
    policy = per_layer(kind, [capacities])[0]
    tokens = tensors(length + 1, 2, 6, 3, seed)
    attention = Attention(0.5, None, window, torch.linspace(-1, 1, 6, dtype=torch.float64) if sinks else None)
    real = torch.rand(2, length + 1, generator=torch.Generator().manual_seed(seed)) < 0.9
    parts = [slice(0, min(cut, length)), slice(min(cut, length), length), slice(length, length + 1)]
    layers, results = [], []
    for together in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head_groups, "_together", lambda _, together=together: together)
            slots = heads.empty_slots(policy, *tokens[1:], 6, window)
            pieces = [([t[:, :, p] for t in tokens], real[:, p]) for p in parts if p.start < p.stop]
            outputs = [heads.read(slots, *new, policy, attention, row, chunk) for new, row in pieces]
        layers.append(slots)
        results.append(torch.cat(outputs, 2).transpose(1, 2)[real])
    tolerance = 1e-9 if policy.heads[0].kv is None else 1e-6
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(layers[1].heads, layers[0].heads, strict=True):
        assert torch.equal(ours.positions.sort(-1)[0], theirs.positions.sort(-1)[0])
        assert torch.equal(ours.seen, theirs.seen)
        assert (ours.positions.gather(2, ours.next[..., None]) == -1).all()


def test_heads_of_similar_size_are_read_together() -> None:
    policy = per_layer("fade", [[100, 512, 513, 1024, 1025, 30]])[0]
    blind = per_layer("window", [[100, 200]])[0]
    key = torch.zeros(1, 6, 1, 2)
    slots, others = heads.empty_slots(policy, key, key, 12), heads.empty_slots(blind, key[:, :2], key[:, :2], 12)
    assert len(heads.read_groups(slots.fork(), policy)) == 6  # a CPU reads one after the other
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_groups, "_together", lambda _: True)
        groups = heads.read_groups(slots, policy)
        assert [group.heads for group in heads.read_groups(others, blind)] == [(1,), (0,)]
    assert [group.heads for group in groups] == [(4,), (2, 3), (0, 1, 5)]
    query = torch.arange(12.0).view(1, 12, 1)
    assert groups[2].take(query).flatten().tolist() == [0, 1, 2, 3, 10, 11]
    output = torch.zeros(1, 12, 1)
    for group in groups:
        group.put(output, group.take(query))
    assert torch.equal(output, query)


def test_steps_equal_reads() -> None:
    policy = per_layer("fade", [[5, 9]])[0]
    tokens, attention = tensors(20, 2, 4, 2, 0), Attention(0.5)
    read, stepped = (heads.empty_slots(policy, *tokens[1:], 4) for _ in range(2))
    expected = heads.read(read, *tokens, policy, attention)
    for step in range(20):
        output = heads.step(stepped, *(t[:, :, step] for t in tokens), policy, attention)
        torch.testing.assert_close(output, expected[:, :, step])
        for part in heads.parts_of(stepped):
            part.seen += 1
            part.fed += 1
    assert torch.equal(stepped.held, read.held)


def test_memory_is_that_of_the_heads() -> None:
    policy = per_layer("fade", [[4, 60]])[0]
    key = torch.zeros(1, 2, 1, 8)
    slots = heads.empty_slots(policy, key, key, 4)
    even = Slots.empty(parse_policy("fade:32"), key, key, 4)
    assert [part.positions.shape[2] for part in heads.parts_of(slots)] == [5, 61]
    assert slots.nbytes == even.nbytes + 8  # each head counts its tokens itself
    assert [part.keys.shape for part in heads.parts_of(slots.fork())] == [(1, 1, 5, 8), (1, 1, 61, 8)]


def test_text_and_averages() -> None:
    plan = per_layer("fade:6,kv=int8", [[4, 8], [2, 10]])
    assert str(plan) == "fade:avg=6,kv=int8"
    assert plan.average == 6
    assert plan.capacities == [[4, 8], [2, 10]]
    assert [parse_layer_policy(str(policy)) for policy in plan.policies] == list(plan.policies)
    assert str(plan[0]) == "fade:4,kv=int8|fade:8,kv=int8"
    assert Plan.of(plan, 2) is plan
    with pytest.raises(ValueError, match="asks for an average of 7, but the capacities by KV head average 6"):
        per_layer("fade:7", [[4, 8], [2, 10]])
    assert per_layer("fade:6", [[2], [4, 8, 10]]).average == 6  # over the heads: layers may have more or fewer of them


@pytest.mark.parametrize("kind", ["tova", "h2o-layer", "tova-query-head"])
def test_heads_that_decide_together_have_no_budgets_of_their_own(kind: str) -> None:
    with pytest.raises(ValueError, match=f"KV heads decide alone, and under {kind} they decide together"):
        per_layer(kind, [[4, 8]])


def test_another_number_of_heads_is_refused() -> None:
    key = torch.zeros(1, 3, 1, 8)
    with pytest.raises(ValueError, match="for 2 KV heads in a layer that has 3"):
        heads.empty_slots(per_layer("fade", [[4, 8]])[0], key, key, 6)
