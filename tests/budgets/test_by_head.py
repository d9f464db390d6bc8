"""Calibration by KV head on a tiny random model: estimated, allocated, resumed, refused, and used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import msrnn
from msrnn.budgets import by_head
from msrnn.budgets.allocate import non_increasing
from msrnn.budgets.by_head import calibrate_by_head, check_heads, continued, estimate_count, head_curves
from msrnn.budgets.calibrate import Meter, Settings, chunks_of
from msrnn.budgets.estimate import combine, head_losses
from msrnn.budgets.profile import dump, plan_for, read_profile
from msrnn.eval.perplexity import token_nll

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = Settings("fade", grid=(4, 8, 16, 32), rounds=0, batch=2)


def chunks() -> torch.Tensor:
    ids = torch.randint(0, 64, (128,), generator=torch.Generator().manual_seed(0))
    return chunks_of(ids.tolist(), 64, 2)


@pytest.fixture
def meter(llama: Any, tmp_path: Path) -> Meter:
    return Meter(llama(), chunks(), QUICK, tmp_path / "measured.jsonl")


def test_curves_are_the_mean_over_chunks_continued_as_they_fall(meter: Meter) -> None:
    curves = head_curves(meter)
    parts = [
        [torch.stack(estimate) for estimate in head_losses(meter.model, row, "fade", QUICK.grid, counted)]
        for row, counted in zip(meter.chunks, meter.counted, strict=True)
    ]
    alone, together = ((first + second) / 2 for first, second in zip(*parts, strict=True))
    for layer in range(3):
        for head in range(2):
            losses = combine(alone[layer, head].tolist(), together[layer, head].tolist(), QUICK.grid)
            falling = [loss for _, loss in non_increasing(dict(zip(QUICK.grid, losses, strict=True)))]
            curve = curves[layer][head]
            assert list(curve) == [4, 8, 16, 32, 64]
            assert list(curve.values())[:4] == pytest.approx(falling, rel=1e-2)
            assert curve[64] == pytest.approx(curve[32] ** 2 / curve[16], rel=1e-2)


def test_the_end_of_a_curve() -> None:
    """For perplexity it falls on as before; for recall a whole chunk loses nothing, though half of it may not help."""
    flat, falling = {4: 2.0, 8: 2.0, 16: 2.0}, {4: 2.0, 8: 1.0, 16: 0.5}
    assert continued(falling, None) == {4: 2.0, 8: 1.0, 16: 0.5, 32: 0.25}
    assert continued(falling, 64) == {4: 2.0, 8: 1.0, 16: 0.5, 64: 0.0}
    assert continued(falling, 16) == {4: 2.0, 8: 1.0, 16: 0.0}
    assert continued(flat, 64)[64] == 0, "so a head that retrieves may be given the whole chunk"


@pytest.mark.parametrize("goal", ["recall", "both"])
def test_a_goal_counts_its_own_tokens(meter: Meter, tmp_path: Path, goal: Any) -> None:
    counted = torch.zeros(2, 63, dtype=torch.bool)
    counted[:, 50:54] = True
    other = Meter(meter.model, meter.chunks, QUICK, tmp_path / "other.jsonl", goal, counted)
    assert calibrate_by_head(other, [12], {}, "")["for"] == goal
    curve = head_curves(other)[0][0]
    assert curve != head_curves(meter)[0][0]
    assert (max(curve), curve[64]) == (64, 0.0)


def test_a_profile_by_head_is_used_as_it_says(meter: Meter, tmp_path: Path) -> None:
    profile = calibrate_by_head(meter, [12, 20], {"names": ["a.txt"]}, "1.2.3")
    file = tmp_path / "profile.json"
    file.write_text(dump(profile))
    assert (profile["by"], profile["policy"], profile["average"]) == ("head", "fade", 12)
    assert sum(map(sum, profile["capacities"])) == 6 * 12
    assert sum(map(sum, profile["allocations"]["20"])) == 6 * 20
    assert read_profile(file) == profile["capacities"]
    others: Any = read_profile(file, 16)
    assert sum(map(sum, others)) == 6 * 16
    cache = msrnn.cache(meter.model, f"fade:12,profile={file}")
    assert cache.plan.capacities == profile["capacities"]
    losses = token_nll(meter.model, meter.chunks, f"fade:12,profile={file}")[:, 31:]
    row = profile["losses"][0]
    assert row["refined"] == min(row["additive"], row["uniform"])
    assert float(losses.mean()) - profile["full_loss"] == pytest.approx(row["refined"], abs=1e-5)


def test_slots_go_to_the_head_that_matters(llama: Any, tmp_path: Path) -> None:
    """Of all heads only KV head 1 of layer 1 is read by the output projections, so it gets all slots there are."""
    model = llama()
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight[:, : 16 if number == 1 else 32] = 0
    meter = Meter(model, chunks(), QUICK, tmp_path / "measured.jsonl")
    profile = calibrate_by_head(meter, [8], {}, "")
    assert profile["capacities"] == [[4, 4], [4, 28], [4, 4]]
    assert profile["losses"][0]["additive"] < profile["losses"][0]["uniform"]


def test_a_killed_run_goes_on_where_it_stopped(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    meter.on_measured = lambda description, loss: calls.append(description)
    whole = calibrate_by_head(meter, [12], {}, "")
    assert len(calls) == estimate_count(meter, [12]) == 5
    lines = meter.measurements.path.read_text().splitlines()
    meter.measurements.path.write_text("\n".join(lines[:2]) + '\n{"key": ["chunk", 1, [4, 8')  # killed in the second
    again = Meter(meter.model, meter.chunks, QUICK, meter.measurements.path)
    estimates: list[torch.Tensor] = []

    def count(model: Any, row: torch.Tensor, *rest: Any) -> Any:
        estimates.append(row)
        return head_losses(model, row, *rest)

    monkeypatch.setattr(by_head, "head_losses", count)
    assert calibrate_by_head(again, [12], {}, "") == whole
    assert [row.tolist() for row in estimates] == [meter.chunks[1].tolist()]
    assert [json.loads(line)["key"] for line in meter.measurements.path.read_text().splitlines()[1:3]] == [
        ["chunk", 0, [4, 8, 16, 32]],
        ["chunk", 1, [4, 8, 16, 32]],
    ]


def test_a_layer_with_a_window_costs_nothing_at_its_window(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, sliding_window=12)
    meter = Meter(MistralForCausalLM(config).eval(), chunks(), QUICK, tmp_path / "m.jsonl")
    assert [list(curve) for layer in head_curves(meter) for curve in layer] == [[4, 8, 12]] * 4


def test_what_has_no_budgets_by_head_is_refused(llama: Any, tmp_path: Path) -> None:
    for kind in ("tova", "h2o-layer"):
        with pytest.raises(ValueError, match=rf"under {kind} they decide together; use fade, h2o or tova-head"):
            check_heads(kind, llama())
    file = tmp_path / "hand.json"
    file.write_text('{"capacities": [[4, 8], [4, 8], [12, 12]]}')
    assert plan_for(f"fade:8,profile={file}", 3).by_head
    with pytest.raises(ValueError, match="asks for an average of 9, but the capacities by KV head average 8"):
        plan_for(f"fade:9,profile={file}", 3)
