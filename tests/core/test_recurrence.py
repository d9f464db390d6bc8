"""The chunked recurrence equals the definition, whatever the policy, chunk, split, padding, grouping or scan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msrnn.core import formats, recurrence, reference
from msrnn.core.attention import Attention
from msrnn.core.rules import FOLDER
from msrnn.core.slots import NEVER, Columns, Slots
from msrnn.kernels.numba import chunk as numba_chunk
from msrnn.kernels.numba import scan as numba_scan
from msrnn.kernels.torch import scan as torch_scan
from msrnn.policy import Policy, parse_policy
from tests.support.referee import decoded, replay
from tests.support.residual import check_residual

SCANS = {"eager": torch_scan.scan, "compiled": numba_scan.scan}
RULES = sorted(file.stem for file in FOLDER.glob("[!_]*.py"))
READS = {"recurrent": recurrence.read, "oneshot": recurrence.read_oneshot}


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    capacity = draw(st.integers(1, 9))
    first = draw(st.integers(0, capacity))
    last = draw(st.integers(0, capacity - first))
    momentum = draw(st.sampled_from([0.0, 0.5, 1.0]))
    scope = draw(st.sampled_from(["layer", "kv_head", "query_head"]))
    gain = draw(st.sampled_from([None, None, "value_norm"]))
    kv = draw(st.sampled_from([None, None, "int8", "k8v4"]))
    residual = draw(st.sampled_from([None, None, 0.0, 0.9, 1.0]))
    bounded = Policy(capacity, first, last, momentum, scope, gain, kv=kv, residual=residual)
    rule = Policy(capacity, first, last, scope=scope, rule=draw(st.sampled_from(RULES)), kv=kv, residual=residual)
    return draw(st.sampled_from([bounded, bounded, bounded, rule, Policy(None, scope=scope, kv=kv)]))


@st.composite
def cases(draw: st.DrawFn) -> dict:
    length, policy = draw(st.integers(1, 40)), draw(policies())
    softcap = None if policy.residual is not None else draw(st.sampled_from([None, None, 2.0]))
    return {
        "policy": policy,
        "length": length,
        "groups": draw(st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 2)])),
        "chunk": draw(st.integers(1, 17)),
        "splits": sorted(draw(st.sets(st.integers(1, length), max_size=3)) | {length}),
        "window": draw(st.sampled_from([None, None, 1, 2, 5, 12])),
        "softcap": softcap,
        "sinks": draw(st.booleans()),
        "scale": draw(st.sampled_from([0.5, 0.5, 8.0])),  # 8: exponentials overflow without a row maximum
        "seed": draw(st.integers(0, 2**16)),
    }


def tensors(length: int, heads: int, kv_heads: int, seed: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = [(batch, n, length, 4) for n in (heads, kv_heads, kv_heads)]
    query, key, value = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shape)
    return 3 * query, key, value  # sharp enough for softmaxes that differ


def chunked(policy, attention, query, key, value, splits, chunk, real=None, prompt="recurrent"):
    """The recurrence fed in pieces; outputs, state and the deaths of each row and unit."""
    state = Slots.empty(policy, key, value, query.shape[1], attention.window)
    deaths: dict[tuple[int, int, int], int] = {}

    def on_evict(positions: Tensor, expiry: Tensor) -> None:
        for b, u, n in ((positions >= 0) & (expiry != NEVER)).nonzero().tolist():
            born = positions[b, u, n].item()
            assert (b, u, born) not in deaths, "a token dies once"
            deaths[b, u, born] = expiry[b, u, n].item()

    outputs, start = [], 0
    for end in splits:
        part = slice(start, end)
        inside = None if real is None else real[:, part]
        arguments = (query[:, :, part], key[:, :, part], value[:, :, part], policy, attention, inside)
        outputs.append(READS[prompt](state, *arguments, chunk=chunk, on_evict=on_evict))
        if policy.capacity is not None:
            assert state.held.max() <= policy.capacity
        start = end
    return torch.cat(outputs, 2), state, deaths


def check_row(row: int, out: Tensor, state: Slots, deaths: dict, ref: reference.Reference, want: Tensor) -> None:
    torch.testing.assert_close(out, want, rtol=0, atol=1e-9)
    for unit, rows in enumerate(ref.rows):
        kept = sorted(p for p in state.positions[row, unit].tolist() if p >= 0)
        assert kept == sorted(r.position for r in rows)
        assert {p: d for (b, u, p), d in deaths.items() if (b, u) == (row, unit)} == ref.deaths[unit]
        if state.scores is not None and state.limit and rows:
            scores = dict(zip(state.positions[row, unit].tolist(), state.scores[row, unit].tolist(), strict=True))
            assert all(abs(scores[r.position] - r.score) < 1e-9 for r in rows)
        if state.residual is not None:
            check_residual(state.residual[row], ref.residuals[unit], unit, len(ref.rows))


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("prompt", ["recurrent", "oneshot"])
@settings(max_examples=120)
@given(case=cases())
def test_chunked_equals_reference(scan: str, prompt: str, case: dict) -> None:
    heads, kv_heads = case["groups"]
    query, key, value = tensors(case["length"], heads, kv_heads, case["seed"])
    sinks = torch.linspace(-1, 1, heads, dtype=torch.float64) if case["sinks"] else None
    attention = Attention(case["scale"], case["softcap"], case["window"], sinks)
    policy = case["policy"] if prompt == "recurrent" else replace(case["policy"], residual=None)
    ref = reference.start(policy, heads, kv_heads)
    want, start = [], 0
    for end in case["splits"]:
        part = slice(start, end)
        arguments = (query[0, :, part], key[0, :, part], value[0, :, part], policy, attention)
        want.append(reference.run(ref, *arguments, oneshot=prompt == "oneshot"))
        start = end
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSRNN_OPS", scan)
        splits, chunk = case["splits"], case["chunk"]
        out, state, deaths = chunked(policy, attention, query, key, value, splits, chunk, prompt=prompt)
    check_row(0, out[0], state, deaths, ref, torch.cat(want, 1))


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("prompt", ["recurrent", "oneshot"])
@settings(max_examples=60)
@given(case=cases(), data=st.data())
def test_padding_changes_nothing(scan: str, prompt: str, case: dict, data: st.DataObject) -> None:
    """Rows with padding anywhere (left, right, between) equal their own single runs without it."""
    policy = case["policy"] if prompt == "recurrent" else replace(case["policy"], residual=None)
    heads, kv_heads = case["groups"]
    query, key, value = tensors(case["length"], heads, kv_heads, case["seed"], batch=3)
    pattern = data.draw(st.lists(st.booleans(), min_size=3 * case["length"], max_size=3 * case["length"]))
    real = torch.tensor(pattern).view(3, -1)
    attention = Attention(case["scale"], case["softcap"], case["window"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSRNN_OPS", scan)
        splits = case["splits"] if prompt == "recurrent" else [case["length"]]
        out, state, deaths = chunked(policy, attention, query, key, value, splits, case["chunk"], real, prompt)
    assert out.isfinite().all()
    for row in range(3):
        mine = real[row]
        if not mine.any():
            assert state.held[row].max() == 0
            continue
        ref = reference.start(policy, heads, kv_heads)
        arguments = (query[row][:, mine], key[row][:, mine], value[row][:, mine], policy, attention)
        check_row(
            row, out[row][:, mine], state, deaths, ref, reference.run(ref, *arguments, oneshot=prompt == "oneshot")
        )


@pytest.mark.parametrize("scan", SCANS)
@settings(max_examples=60)
@given(case=cases())
def test_float32_is_refereed(scan: str, case: dict) -> None:
    """Near-ties fall either way in float32, so evictions are replayed. Codes do not: they are those of each token."""
    heads, kv_heads = case["groups"]
    limit = case["policy"].capacity or 9
    policy, attention = replace(case["policy"], capacity=limit, gain=None, rule=None, residual=None), Attention(0.5)
    query, key, value = (rows.float() for rows in tensors(case["length"], heads, kv_heads, case["seed"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSRNN_OPS", scan)
        out, state, deaths = chunked(policy, attention, query, key, value, case["splits"], case["chunk"])
    table = torch.full((state.positions.shape[1], case["length"]), NEVER)
    for (_, unit, born), last in deaths.items():
        table[unit, born] = last
    verdict = replay(query[0].double(), *decoded(key[0], value[0], policy), table, policy, attention)
    torch.testing.assert_close(out[0].double(), verdict.outputs, rtol=0, atol=1e-5)
    assert verdict.regret <= 1e-5
    check_codes(state, *state.expand(key, value))


def check_codes(state: Slots, key: Tensor, value: Tensor) -> None:
    """What is held of keys [1, G, T, D] and values of all tokens, bit for bit."""
    stored = (key, value) if state.kv is None else formats.encode(key, value, state.kv)
    positions = state.positions.repeat_interleave(len(key[0]) // state.positions.shape[1], 1)
    for ours, rows in zip(state.stored, stored, strict=True):
        token = positions.clamp(min=0)[..., None].expand(*positions.shape, rows.shape[3])
        assert torch.equal(ours[positions >= 0], rows.gather(2, token)[positions >= 0])


@pytest.mark.parametrize("name", ["tova:6", "h2o:6", "window+2:6", "fade:6"])
def test_quick_reading_hands_over_where_exponentials_overflow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and columns are then as they were before the chunk that could not be read quickly."""
    monkeypatch.setenv("MSRNN_OPS", "compiled")
    policy, attention = parse_policy(name), Attention(0.5)
    query, key, value = tensors(40, 4, 2, seed=3)
    key[:, :, 23] *= 300
    fast = []
    attend = numba_chunk.Chunks.attend
    monkeypatch.setattr(numba_chunk.Chunks, "attend", lambda *given: fast.append(attend(*given)) or fast[-1])
    out, state, deaths = chunked(policy, attention, query, key, value, [40], 5)
    assert len(fast) >= 2
    assert fast[-1] is None, "the chunk with the huge key, and none after it"
    assert all(expiry is not None for expiry in fast[:-1])
    ref = reference.start(policy, 4, 2)
    check_row(0, out[0], state, deaths, ref, reference.run(ref, query[0], key[0], value[0], policy, attention))


def softmax(weights: Tensor, mass: Tensor | None) -> Tensor:
    return weights if mass is None else weights / mass


@pytest.mark.parametrize("scan", SCANS)
def test_ties_the_older_leaves(scan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSRNN_OPS", scan)
    flat = torch.zeros(1, 1, 10, 4, dtype=torch.float64)  # every weight of a row is the same
    _, state, deaths = chunked(parse_policy("tova:4"), Attention(1.0), flat, flat, flat, [10], 7)
    assert sorted(state.positions[0, 0].tolist()) == [-1, 6, 7, 8, 9]
    assert deaths == {(0, 0, p): p + 4 for p in range(6)}


@pytest.mark.parametrize("scan", SCANS)
def test_a_dead_maximum_does_not_starve_the_row(scan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that left may hold a chunk's largest logit; taking it as the row's maximum would give 0 / 0."""
    monkeypatch.setenv("MSRNN_OPS", scan)
    logits = torch.zeros(1, 1, 3, 4)
    logits[..., 0] = torch.tensor([-1.0, 500.0, 500.0])  # the victim of row 0, and huge afterwards
    positions = torch.tensor([[[0, 1, 2, 3]]])
    columns, steps = Columns(logits, logits, positions), torch.tensor([[1, 2, 3]])
    weights, mass, expiry, *_ = SCANS[scan](logits, columns, steps, parse_policy("tova:1"), Attention(1.0))
    assert expiry.tolist() == [[[1, 2, 3, NEVER]]]
    torch.testing.assert_close(softmax(weights, mass)[0, 0, 1:], torch.tensor([[0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]]))


def test_compiled_scan_in_float32_is_refereed() -> None:
    """Replay the float32 kernel's evictions in float64: none is worse than the best choice by more than rounding."""
    torch.manual_seed(0)
    heads, columns, rows, capacity = 9, 96, 32, 64
    logits = 4 * torch.randn(1, heads, rows, columns, dtype=torch.float64)
    positions = torch.arange(columns).view(1, 1, -1)
    steps = torch.arange(columns - rows, columns).view(1, -1)
    got = numba_scan.scan(
        logits.float(), Columns(logits, logits, positions), steps, parse_policy(f"tova:{capacity}"), Attention(1.0)
    )
    for row, now in enumerate(steps[0].tolist()):
        visible = (positions[0, 0] <= now) & (got.expiry[0, 0] >= now)
        exact = logits[0, :, row].masked_fill(~visible, -torch.inf).softmax(-1)
        assert (softmax(got.weights, got.total)[0, :, row] - exact).abs().max() < 1e-6
        victim = (got.expiry[0, 0] == now).nonzero().flatten()
        assert len(victim) == 1
        regret = exact.mean(0)[victim] - exact.mean(0)[visible].min()
        assert regret < 1e-8


def test_scan_by_hand() -> None:
    """TOVA with room for two: the weights of step 2 are 1/4, 1/2, 1/4, and the older of the two lowest leaves."""
    logits = torch.tensor([[0, 1, 0, 9], [7, 0, 1, 2]], dtype=torch.float64) * math.log(2)
    for scan in SCANS.values():
        positions, steps = torch.tensor([[[0, 1, 2, 3]]]), torch.tensor([[2, 3]])
        columns = Columns(logits, logits, positions)
        got = scan(logits.view(1, 1, 2, 4).clone(), columns, steps, parse_policy("tova:2"), Attention(1.0))
        want = torch.tensor([[0.25, 0.5, 0.25, 0], [0, 1 / 7, 2 / 7, 4 / 7]], dtype=torch.float64)
        torch.testing.assert_close(softmax(got.weights, got.total)[0, 0], want)
        assert got.expiry.tolist() == [[[2, 3, NEVER, NEVER]]]


def test_window_by_hand() -> None:
    """Window+1 with three slots holds the first token and the two newest."""
    query, key, value = tensors(9, 1, 1, 0)
    _, state, deaths = chunked(parse_policy("window+1:3"), Attention(1.0), query, key, value, [9], 4)
    assert sorted(state.positions[0, 0].tolist()) == [-1, 0, 7, 8]
    assert deaths == {(0, 0, p): p + 2 for p in range(1, 7)}


def test_h2o_newcomer_is_protected() -> None:
    """A newcomer's score starts low; without the recent half it would always be the one to leave."""
    query, key, value = tensors(50, 2, 2, 1)
    _, state, _ = chunked(parse_policy("h2o:8"), Attention(1.0), query, key, value, [50], 16)
    for unit in state.positions[0].tolist():
        assert {46, 47, 48, 49} <= set(unit)
