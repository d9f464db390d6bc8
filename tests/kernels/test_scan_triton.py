"""The Triton scan, interpreted on the CPU, equals the plain one: every policy, scope, window, sinks, padding, ties."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.core.attention import Attention
from msrnn.core.slots import NEVER, Columns
from msrnn.core.units import unit_policies
from msrnn.kernels import Scan
from msrnn.kernels.torch import scan as torch_scan
from msrnn.policy import Policy, parse_policy, with_capacity
from tests.support.interpreted import INTERPRETED, nan_in_fresh_memory, run_cases

if INTERPRETED:
    from msrnn.kernels.triton import scan as triton_scan
    from msrnn.kernels.triton import scan_residual

HEADS, KV_HEADS, ROWS = 4, 2, 6


@pytest.mark.slow
def test_interpreted() -> None:
    run_cases(__file__)


@pytest.fixture(autouse=INTERPRETED)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks and tiles so small that a few rows and heads make several of them, and NaN in all memory that is fresh."""
    monkeypatch.setattr(triton_scan, "_ROWS", 2)
    monkeypatch.setattr(triton_scan, "_TILE", 8)
    monkeypatch.setattr(scan_residual, "_TILE", 8)
    with nan_in_fresh_memory():
        yield


def chunk(
    policy: Policy, held: int, seed: int = 0, padded: bool = False, spread: float = 2.0, scored: bool = True
) -> tuple[Tensor, Columns, Tensor]:
    """Logits, columns and steps of a chunk that meets `held` slots, in no order, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    units = {"layer": 1, "kv_head": KV_HEADS, "query_head": HEADS}[policy.scope]
    batch = 2 if units == 1 or padded else 1
    real = torch.rand(batch, ROWS, generator=generator) > 0.3 if padded else torch.ones(batch, ROWS, dtype=torch.bool)
    seen = torch.randint(held, held + 9, (batch, 1), generator=generator)
    steps = torch.where(real, seen + real.cumsum(1) - 1, -1)
    order = torch.rand(batch, units, held + 9, generator=generator)
    order[torch.arange(held + 9).expand_as(order) >= seen[:, None]] = 2  # not there yet, so last
    old = order.argsort(-1)[..., :held]
    old[torch.rand(old.shape, generator=generator) < 0.1] = -1
    positions = torch.cat([old, steps[:, None].expand(-1, units, -1)], 2)
    size = held + ROWS
    logits = spread * torch.randn(batch, HEADS, ROWS, size, generator=generator, dtype=torch.float64)
    scores = torch.rand(positions.shape, generator=generator, dtype=torch.float64) if scored else None
    stored = max(units, KV_HEADS)
    gains = None
    if policy.gain is not None:
        gains = 3 * torch.rand(batch, stored, size, generator=generator, dtype=torch.float64)
    rows = torch.randn(batch, stored, size, 3, generator=generator, dtype=torch.float64)  # only a residual reads them
    columns = Columns(rows, rows, positions, scores, gains)
    if policy.residual is not None:
        columns = columns._replace(residual=residual(batch, stored, units, generator))
        before = spread * torch.randn(batch, HEADS, ROWS, 1, generator=generator, dtype=torch.float64)
        logits = torch.cat([logits, before], -1)
    return logits, columns, steps


def residual(batch: int, stored: int, units: int, generator: torch.Generator) -> Tensor:
    """Of some tokens, or of none; the heads of a unit have as many."""
    means = torch.randn(batch, stored, 6, generator=generator, dtype=torch.float64)
    number = 5 * torch.rand(batch, units, 1, generator=generator, dtype=torch.float64) + 1
    number[torch.rand(batch, units, 1, generator=generator) < 0.3] = 0
    number = number.repeat_interleave(stored // units, 1)
    return torch.cat([means.masked_fill(number == 0, 0), number], -1)


def softmax(result: Scan) -> Tensor:
    return result.weights if result.total is None else result.weights / result.total


def assert_same(result: Scan, expected: Scan) -> None:
    assert torch.equal(result.expiry, expected.expiry)
    torch.testing.assert_close(softmax(result), softmax(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(result.scores, expected.scores, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.residual, expected.residual, rtol=0, atol=1e-12)
    assert torch.equal(result.weights == 0, expected.weights == 0)


def compare(logits: Tensor, columns: Columns, steps: Tensor, policy: Policy, attention: Attention) -> None:
    arguments = (logits, columns, steps, policy, attention)
    assert_same(triton_scan.scan(*arguments), torch_scan.scan(*arguments))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "wide window": {"window": 9},
    "sinks, padding": {"sinks": True, "padded": True},
    "nothing held, padding": {"held": 0, "padded": True, "scored": False},
}
PAIRS = (
    ("tova:6", "plain"),
    ("tova:6", "window"),
    ("tova+2:6,last=2", "sinks, padding"),
    ("tova+2:6,last=2", "nothing held, padding"),
    ("h2o-layer+1:6,momentum=0.9", "plain"),
    ("h2o-layer+1:6,momentum=0.9", "window"),
    ("h2o-layer+1:6,momentum=0.9", "sinks, padding"),
    ("h2o:6", "plain"),
    ("h2o:6", "sinks, padding"),
    ("tova-head:5", "window"),
    ("tova-head:5", "nothing held, padding"),
    ("tova-query-head:4", "window"),
    ("tova-query-head:4", "sinks, padding"),
    ("full", "plain"),
    ("tova:6,gain=value_norm", "plain"),
    ("tova:6,gain=value_norm", "wide window"),
    ("tova+2:6,last=2,gain=value_norm", "sinks, padding"),
    ("tova:6,momentum=0.5,gain=value_norm", "wide window"),
    ("h2o-layer+1:6,momentum=0.9,gain=value_norm", "sinks, padding"),
    ("h2o:6,gain=value_norm", "plain"),
    ("h2o:6,gain=value_norm", "wide window"),
    ("tova-head:5,gain=value_norm", "sinks, padding"),
    ("tova-head:5,gain=value_norm", "nothing held, padding"),
    ("tova-query-head:4,gain=value_norm", "plain"),
    ("blend:6", "plain"),
    ("blend:6", "wide window"),
    ("blend-layer+1:6", "sinks, padding"),
    ("tova+2:6,residual=0.9,gain=value_norm", "sinks, padding"),
    ("tova-query-head:4,residual=1", "window"),
    ("blend:6", "nothing held, padding"),
)


@pytest.mark.parametrize("text, name", PAIRS)
def case_equals_torch(text: str, name: str) -> None:
    policy, case = parse_policy(text), CASES[name]
    padded, scored = case.get("padded", False), case.get("scored", True)
    logits, columns, steps = chunk(policy, case.get("held", 7), len(text), padded, scored=scored)
    sinks = torch.tensor([0.5, -1, 3, 0], dtype=torch.float64) if case.get("sinks") else None
    compare(logits, columns, steps, policy, Attention(1.0, window=case.get("window"), sinks=sinks))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("text", ["tova:6,gain=value_norm", "tova-head:5,gain=value_norm", "h2o:6,gain=value_norm"])
def case_gains_equal_torch(text: str, seed: int) -> None:
    """Logits so even that gains decide, and so uneven that what has left was most of a row."""
    policy = parse_policy(text)
    compare(*chunk(policy, 7, seed, spread=(0.1, 1.0, 6.0)[seed % 3]), policy, Attention(1.0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["fade", "h2o", "tova-head", "tova-head,gain=value_norm"])
def case_units_with_numbers_of_their_own(kind: str, seed: int) -> None:
    """As plain PyTorch has them, and each unit as its own policy does alone."""
    heads = [with_capacity(kind, capacity) for capacity in (3, 7)]
    policy, attention = unit_policies(heads, torch.device("cpu")), Attention(1.0)
    logits, columns, steps = chunk(heads[1], 7, seed, scored=heads[0].momentum > 0)
    compare(logits, columns, steps, policy, attention)
    whole = triton_scan.scan(logits, columns, steps, policy, attention)
    share = HEADS // KV_HEADS
    for unit, own in enumerate(heads):
        rows = Columns(*(None if row is None else row[:, unit : unit + 1] for row in columns))
        alone = triton_scan.scan(logits[:, unit * share : (unit + 1) * share], rows, steps, own, attention)
        assert torch.equal(whole.expiry[:, unit], alone.expiry[:, 0])
        torch.testing.assert_close(whole.scores[:, unit], alone.scores[:, 0])


def case_all_padding() -> None:
    policy = parse_policy("h2o:6")
    logits, columns, steps = chunk(policy, 7)
    compare(logits, columns, torch.full_like(steps, -1), policy, Attention(1.0))


@pytest.mark.parametrize("text", ["tova:6", "h2o-layer:6"])
def case_of_equal_scores_the_older_leaves(text: str) -> None:
    policy = parse_policy(text)
    logits, columns, steps = chunk(policy, 7, scored=False)
    compare(torch.zeros_like(logits), columns, steps, policy, Attention(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def case_an_evicted_maximum_does_not_swallow_the_row(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 1, 3, 4, dtype=dtype)
    logits[..., 0] = torch.tensor([-1.0, 500.0, 500.0])  # the victim of row 0, and huge afterwards
    rows = torch.zeros(1, 1, 4, 1, dtype=dtype)
    columns = Columns(rows, rows, torch.tensor([[[0, 1, 2, 3]]]))
    result = triton_scan.scan(logits, columns, torch.tensor([[1, 2, 3]]), parse_policy("tova:1"), Attention(1.0))
    assert result.expiry.tolist() == [[[1, 2, 3, NEVER]]]
    expected = torch.tensor([[0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]], dtype=dtype)
    torch.testing.assert_close(softmax(result)[0, 0, 1:], expected)


def case_a_hidden_column_may_hold_anything() -> None:
    policy = parse_policy("tova:6")
    logits, columns, steps = chunk(policy, 7)
    columns.positions[:, :, 3] = -1
    logits[..., 3] = torch.inf
    result = triton_scan.scan(logits, columns, steps, policy, Attention(1.0))
    assert softmax(result).isfinite().all()
    assert result.scores.isfinite().all()


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("text", ["tova:6", "tova:6,gain=value_norm"])
def case_float32_is_refereed(text: str, spread: float) -> None:
    """Replay the evictions in float64: none may be worse than the best choice by more than rounding."""
    policy = parse_policy(text)
    logits, columns, steps = chunk(policy, 7, spread=spread, scored=False)
    positions, gains = columns.positions, columns.gains
    narrow = columns if gains is None else columns._replace(gains=gains.float())
    result = triton_scan.scan(logits.float(), narrow, steps, policy, Attention(1.0))
    for row in range(ROWS):
        now = steps[:, row, None, None]
        visible = (positions >= 0) & (positions <= now) & (result.expiry >= now)
        exact = logits[:, :, row].masked_fill(~visible, -torch.inf).softmax(-1)
        assert (softmax(result)[:, :, row] - exact).abs().max() < 1e-6
        scored = exact if gains is None else exact * gains.repeat_interleave(HEADS // KV_HEADS, 1)
        mean = scored.mean(1, keepdim=True)
        victim = result.expiry == now
        assert torch.equal(victim.sum(-1) > 0, visible.sum(-1) > 6)
        best = mean.masked_fill(~visible, torch.inf).amin(-1, keepdim=True)
        assert ((mean - best)[victim] < 1e-7 * (1 if gains is None else 3)).all()  # a gain is at most 3
