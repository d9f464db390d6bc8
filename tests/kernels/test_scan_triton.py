"""The Triton scan, interpreted on the CPU, equals the plain one: every policy, scope, window, sinks, padding, ties."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from msrnn import kernels as ops
from msrnn.kernels.torch import scan as eager
from msrnn.policy import parse
from tests.support.interpreted import INTERPRETED, run_cases

if INTERPRETED:
    from msrnn.kernels.triton import scan as gpu


def test_interpreted() -> None:
    run_cases(__file__)


@pytest.fixture(autouse=INTERPRETED)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks and tiles so small that a few rows and heads make several of them, and NaN in all memory that is fresh."""
    monkeypatch.setattr(gpu, "_ROWS", 2)
    monkeypatch.setattr(gpu, "_TILE", 8)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def chunk(policy: str, held: int, seed: int = 0, padded: bool = False, spread: float = 2.0):
    """Logits, births, steps and scores of a chunk that meets `held` slots, in no order, some of them empty."""
    made, heads, rows = torch.Generator().manual_seed(seed), 4, 6
    units = {"layer": 1, "kv_head": 2, "query_head": heads}[parse(policy).scope]
    batch = 2 if units == 1 or padded else 1
    real = torch.rand(batch, rows, generator=made) > 0.3 if padded else torch.ones(batch, rows, dtype=torch.bool)
    seen = torch.randint(held, held + 9, (batch, 1), generator=made)
    steps = torch.where(real, seen + real.cumsum(1) - 1, -1)
    order = torch.rand(batch, units, held + 9, generator=made)
    order[torch.arange(held + 9).expand_as(order) >= seen[:, None]] = 2  # not there yet, so last
    old = order.argsort(-1)[..., :held]
    old[torch.rand(old.shape, generator=made) < 0.1] = -1
    births = torch.cat([old, steps[:, None].expand(-1, units, -1)], 2)
    logits = spread * torch.randn(batch, heads, rows, held + rows, generator=made, dtype=torch.float64)
    scores = torch.rand(births.shape, generator=made, dtype=torch.float64)
    return logits, births, steps, scores


def softmax(got: eager.Scanned) -> Tensor:
    return got.weights if got.mass is None else got.weights / got.mass


def same(got: eager.Scanned, want: eager.Scanned) -> None:
    assert torch.equal(got.expiry, want.expiry)
    torch.testing.assert_close(softmax(got), softmax(want), rtol=0, atol=1e-12)
    torch.testing.assert_close(got.scores, want.scores, rtol=0, atol=1e-12)
    assert torch.equal(got.weights == 0, want.weights == 0)


CASES = {
    "plain": {},
    "window": {"window": 5},
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
)


@pytest.mark.parametrize("policy, case", PAIRS)
def case_equals_eager(policy: str, case: str) -> None:
    how = CASES[case]
    tensors = chunk(policy, how.get("held", 7), len(policy), how.get("padded", False))
    if not how.get("scored", True):
        tensors = (*tensors[:3], None)
    sinks = torch.tensor([0.5, -1, 3, 0], dtype=torch.float64) if how.get("sinks") else None
    arguments = (*tensors, parse(policy), how.get("window"), sinks)
    same(gpu.scan(*arguments), eager.scan(*arguments))


def case_all_padding() -> None:
    logits, births, steps, scores = chunk("h2o:6", 7)
    arguments = (logits, births, torch.full_like(steps, -1), scores, parse("h2o:6"))
    same(gpu.scan(*arguments), eager.scan(*arguments))


@pytest.mark.parametrize("policy", ["tova:6", "h2o-layer:6"])
def case_ties_the_older_leaves(policy: str) -> None:
    logits, births, steps, _ = chunk(policy, 7)
    arguments = (torch.zeros_like(logits), births, steps, None, parse(policy))
    same(gpu.scan(*arguments), eager.scan(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def case_a_dead_maximum_does_not_starve_the_row(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 1, 3, 4, dtype=dtype)
    logits[..., 0] = torch.tensor([-1.0, 500.0, 500.0])  # the victim of row 0, and huge afterwards
    births = torch.tensor([[[0, 1, 2, 3]]])
    got = gpu.scan(logits, births, torch.tensor([[1, 2, 3]]), None, parse("tova:1"))
    assert got.expiry.tolist() == [[[1, 2, 3, ops.NEVER]]]
    want = torch.tensor([[0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]], dtype=dtype)
    torch.testing.assert_close(softmax(got)[0, 0, 1:], want)


def case_a_hidden_column_may_hold_anything() -> None:
    logits, births, steps, scores = chunk("tova:6", 7)
    births[:, :, 3] = -1
    logits[..., 3] = torch.inf
    got = gpu.scan(logits, births, steps, scores, parse("tova:6"))
    assert softmax(got).isfinite().all()
    assert got.scores.isfinite().all()


@pytest.mark.parametrize("spread", [0.5, 4.0])
def case_float32_is_refereed(spread: float) -> None:
    """Replay the evictions in float64: none may be worse than the best choice by more than rounding."""
    logits, births, steps, _ = chunk("tova:6", 7, spread=spread)
    got = gpu.scan(logits.float(), births, steps, None, parse("tova:6"))
    for row in range(steps.shape[1]):
        now = steps[:, row, None, None]
        seen = (births >= 0) & (births <= now) & (got.expiry >= now)
        exact = logits[:, :, row].masked_fill(~seen, -torch.inf).softmax(-1)
        assert (softmax(got)[:, :, row] - exact).abs().max() < 1e-6
        mean = exact.mean(1, keepdim=True)
        victim = got.expiry == now
        assert torch.equal(victim.sum(-1) > 0, seen.sum(-1) > 6)
        best = mean.masked_fill(~seen, torch.inf).amin(-1, keepdim=True)
        assert ((mean - best)[victim] < 1e-7).all()
