"""NaN logits in Triton's kernels, in its interpreter: no column outside is named, and the bound holds."""

from __future__ import annotations

import itertools

import pytest
import torch

from msrnn.core.attention import Attention
from msrnn.core.slots import NEVER, Columns
from msrnn.policy import parse_policy
from tests.support.interpreted import INTERPRETED, run_cases

POLICIES = ("tova:6", "h2o:6", "tova-head+2:6", "tova:6,gain=value_norm", "tova:1")
HEADS, KV_HEADS, ROWS, HELD = 4, 2, 20, 6


@pytest.mark.slow
def test_triton_scan_with_nan() -> None:
    run_cases(__file__)


if INTERPRETED:
    from msrnn.kernels.torch.scan import scan as torch_scan
    from msrnn.kernels.triton.scan import scan as triton_scan

    @pytest.mark.parametrize("policy, where", itertools.product(POLICIES, ("all", "one row", "one column", "one head")))
    def case_nan(policy: str, where: str) -> None:
        rule, generator = parse_policy(policy), torch.Generator().manual_seed(0)
        units = 1 if rule.scope == "layer" else KV_HEADS
        held = min(HELD, rule.capacity or HELD)
        columns = held + ROWS
        logits = torch.randn(1, HEADS, ROWS, columns, generator=generator)
        place = {"all": ..., "one row": (0, slice(None), 3), "one column": (..., 2), "one head": (0, 1)}[where]
        logits[place] = float("nan")
        positions = torch.arange(columns).expand(1, units, -1).contiguous()
        gains = torch.rand(1, KV_HEADS, columns, generator=generator) if rule.gain else None
        rows = torch.zeros(1, KV_HEADS, columns, 4)
        given = Columns(rows, rows, positions, torch.zeros(1, units, columns), gains)
        steps = torch.arange(held, columns)[None]
        for scan in (triton_scan, torch_scan):
            result = scan(logits.clone(), given, steps, rule, Attention(1.0))
            staying = (result.expiry == NEVER).sum(-1)
            assert bool((staying == rule.capacity).all()), (scan.__module__, staying)
            left = result.expiry[result.expiry != NEVER]
            assert bool((left >= held).all())
            assert bool((left < columns).all())
            kept = (result.expiry == NEVER)[..., : rule.first]
            assert bool(kept.all()), "protected"
