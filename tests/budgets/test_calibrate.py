"""Calibration on a tiny random model: real measurements, resumed, refused, and used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import msrnn
from msrnn.budgets.allocate import allocate
from msrnn.budgets.calibrate import (
    Meter,
    Settings,
    calibrate,
    chunks_of,
    default_grid,
    default_text,
    layer_curves,
    measurement_count,
    refine,
    with_earlier,
)
from msrnn.budgets.profile import dump, plan_for
from msrnn.eval.measurements import Measurements
from msrnn.eval.perplexity import token_nll
from msrnn.hf.identity import ProfileError, check_profile, profile_identity
from msrnn.policy import full, tova

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = Settings(grid=(4, 8, 16, 32), rounds=1, batch=2)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def meter(llama: Any, tmp_path: Path) -> Meter:
    return Meter(llama(), chunks_of(text(3 * 64), 64, 3), QUICK, tmp_path / "measured.jsonl")


def test_chunks_are_spread_over_the_text() -> None:
    result = chunks_of(list(range(100)), 16, 3)
    assert result[:, 0].tolist() == [0, 32, 64]
    assert chunks_of(list(range(100)), 16, 50).shape == (6, 16)
    with pytest.raises(ValueError, match="15 tokens, fewer than one chunk of 16"):
        chunks_of(list(range(15)), 16, 1)
    with pytest.raises(ValueError, match="chunks of 4 tokens are too short"):
        chunks_of(list(range(15)), 4, 1)


def test_the_loss_is_that_of_the_second_half(meter: Meter) -> None:
    policies = [tova(8), full(), tova(16)]
    nll = token_nll(meter.model, meter.chunks, msrnn.Plan(tuple(policies)))
    assert meter.loss((8, None, 16)) == pytest.approx(float(nll[:, 31:].mean()), abs=1e-6)
    plain = token_nll(meter.model, meter.chunks)[:, 31:].mean()
    assert meter.loss((None, None, None)) == pytest.approx(float(plain), abs=1e-5)


def test_curves_shrink_one_layer_each(meter: Meter) -> None:
    result = layer_curves(meter)
    floor = meter.loss((None,) * 3)
    assert [sorted(curve) for curve in result] == [[4, 8, 16, 32]] * 3
    assert result[1][8] == pytest.approx(meter.loss((None, 8, None)) - floor)
    assert result[0][4] != result[2][4]


def test_for_recall_a_layer_may_be_given_the_whole_chunk(llama: Any, tmp_path: Path) -> None:
    """One that retrieves may lose as much with half of a chunk as with few tokens: its curve ends at no loss."""
    counted = torch.zeros(2, 63, dtype=torch.bool)
    counted[:, 50:54] = True
    meter = Meter(llama(), chunks_of(text(128), 64, 2), QUICK, tmp_path / "measured.jsonl", "recall", counted)
    assert [sorted(curve) for curve in layer_curves(meter)] == [[4, 8, 16, 32, 64]] * 3
    assert [curve[64] for curve in layer_curves(meter)] == [0.0] * 3
    assert sum(calibrate(meter, [20], {}, "")["capacities"]) == 60
    assert (64, None, None) not in meter.measurements, "it is known to lose nothing"
    retrieves = {4: 0.3, 8: 0.3, 16: 0.3, 32: 0.3, 64: 0.0}
    assert allocate([retrieves, {4: 0.02, 8: 0.01, 16: 0.0, 64: 0.0}], 80) == [64, 16]


def test_joint_moves_keep_the_sum_and_never_make_it_worse(meter: Meter) -> None:
    start = [16, 16, 16]
    best, better = refine(meter, start)
    assert sum(best) == 48
    assert meter.loss(tuple(best)) <= meter.loss(tuple(start))
    assert (best != start) == (better > 0)


def test_a_profile_says_what_it_was_made_from(meter: Meter) -> None:
    profile = calibrate(meter, [12, 20], {"names": ["a.txt"]}, "1.2.3")
    assert sum(profile["capacities"]) == 36
    assert sum(profile["allocations"]["20"]) == 60
    assert all(4 <= c <= 32 for c in profile["capacities"])
    assert (profile["msrnn"], profile["policy"], profile["grid"]) == ("1.2.3", "tova", [4, 8, 16, 32])
    assert profile["text"]["names"] == ["a.txt"]
    assert profile["text"]["chunks"] == [3, 64]
    assert profile["model"]["layers"] == 3
    for row in profile["losses"]:
        assert row["refined"] <= min(row["additive"], row["uniform"]) + 1e-9
    assert json.loads(dump(profile)) == json.loads(json.dumps(profile))


def test_averages_of_an_earlier_profile_stay_as_they_are() -> None:
    rows = [{"average": 8, "uniform": 0.5}, {"average": 12, "uniform": 0.3}]
    earlier = {"average": 8, "capacities": [4, 12], "allocations": {"12": [8, 16]}, "losses": rows}
    new = {"average": 12, "capacities": [10, 14], "allocations": {}, "losses": [{"average": 12, "uniform": 0.2}]}
    assert with_earlier(new, {}) == new
    joined = with_earlier(new, earlier)
    assert (joined["average"], joined["capacities"], joined["allocations"]) == (12, [10, 14], {"8": [4, 12]})
    assert joined["losses"] == [{"average": 12, "uniform": 0.2}, {"average": 8, "uniform": 0.5}]
    assert with_earlier(new, {"capacities": [1, 1]}) == new  # written by hand: it has no average to keep


def test_the_bar_counts_to_what_is_measured(meter: Meter) -> None:
    calls = []
    meter.on_measured = lambda description, loss: calls.append(description)
    calibrate(meter, [12], {}, "")
    assert measurement_count(meter, [12]) - 2 * 3 <= len(calls) <= measurement_count(meter, [12])
    assert len(set(meter.measurements.results)) == len(meter.measurements.results) <= len(calls)


def test_a_killed_run_goes_on_without_repeating(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunks, file = llama(), chunks_of(text(128), 64, 2), tmp_path / "measured.jsonl"
    whole = calibrate(Meter(model, chunks, QUICK, tmp_path / "whole.jsonl"), [12], {}, "")
    killed = Meter(model, chunks, QUICK, file)
    measure, count = killed._measure, 0

    def stop_at_ten(capacities: Any) -> Any:
        nonlocal count
        count += 1
        if count > 10:
            raise KeyboardInterrupt
        return measure(capacities)

    monkeypatch.setattr(killed, "_measure", stop_at_ten)
    with pytest.raises(KeyboardInterrupt):
        calibrate(killed, [12], {}, "")
    with file.open("a") as half:
        half.write('{"key": [4, null, nu')  # the kill came in the middle of a line
    again = Meter(model, chunks, QUICK, file)
    assert len(again.measurements.results) == 10
    assert calibrate(again, [12], {}, "") == whole
    keys = [json.loads(line)["key"] for line in file.read_text().splitlines()[1:]]
    assert len(keys) == len({json.dumps(key) for key in keys})


def test_measurements_of_another_run_are_refused(llama: Any, tmp_path: Path) -> None:
    file, model = tmp_path / "measured.jsonl", llama()
    Meter(model, chunks_of(text(128), 64, 2), QUICK, file)
    with pytest.raises(ValueError, match=r"another run \(another text\); remove it"):
        Meter(model, chunks_of(text(128, seed=1), 64, 2), QUICK, file)
    with pytest.raises(ValueError, match="another policy"):
        Meter(model, chunks_of(text(128), 64, 2), Settings("h2o", QUICK.grid), file)
    torch.manual_seed(5)
    other = type(model)(model.config).eval()
    with pytest.raises(ValueError, match="another weights"):
        Meter(other, chunks_of(text(128), 64, 2), QUICK, file)
    file.write_text("no measurements\n")
    with pytest.raises(ValueError, match="not a file of measurements"):
        Measurements(file, {})


@pytest.mark.parametrize(
    "settings, averages, reason",
    [
        (Settings(grid=(4, 64)), [12], "grid goes up to 64, but the loss is counted from token 32"),
        (Settings(grid=(8, 4)), [6], "each above the last"),
        (
            Settings(grid=(4, 8)),
            [12],
            "12 lies outside the grid, 4 to 8; use an average within it, or a grid that reaches 12",
        ),
        (Settings("tova+6", grid=(4, 8)), [8], "6 first and 0 last slots are protected, more than the capacity of 4"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: Settings, averages: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        settings.check(3, 64, averages)


def test_the_grid_reaches_half_a_chunk() -> None:
    assert default_grid(4096) == (16, 32, 64, 128, 256, 512, 1024, 2048)
    assert default_grid(2048, 4) == (16, 64, 256, 1024)
    assert default_grid(20) == (10,)


def test_a_layer_with_a_window_costs_nothing_at_its_window(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, sliding_window=12)
    model = MistralForCausalLM(config).eval()
    meter = Meter(model, chunks_of(text(128), 64, 2), QUICK, tmp_path / "m.jsonl")
    assert meter.limits == [12, 12]
    assert [sorted(curve) for curve in layer_curves(meter)] == [[4, 8, 12]] * 2
    assert calibrate(meter, [10], {}, "")["capacities"] != []


@pytest.fixture
def profile(meter: Meter, tmp_path: Path) -> Path:
    file = tmp_path / "profile.json"
    file.write_text(dump(calibrate(meter, [12, 20], {}, "")))
    return file


def test_a_policy_with_a_profile_is_one_policy_per_layer(meter: Meter, profile: Path) -> None:
    content = json.loads(profile.read_text())
    used = msrnn.cache(meter.model, f"tova:12,profile={profile}").plan
    assert [policy.capacity for policy in used.policies] == content["capacities"]
    assert [p.capacity for p in plan_for(f"h2o,profile={profile}", 3).policies] == content["capacities"]
    assert [p.capacity for p in plan_for(f"tova:20,profile={profile}", 3).policies] == content["allocations"]["20"]
    between = [p.capacity for p in plan_for(f"tova:16,profile={profile}", 3).policies]  # from the curves
    assert sum(c for c in between if c) == 48
    with pytest.raises(ValueError, match=r"no capacities for an average of 2: 6 slots are fewer"):
        plan_for(f"tova:2,profile={profile}", 3)


def test_another_model_is_refused_another_dtype_is_not(llama: Any, meter: Meter, profile: Path) -> None:
    check_profile(profile, meter.model)
    check_profile(profile, llama().to(torch.bfloat16))
    check_profile(profile, llama().to(torch.float16))
    torch.manual_seed(5)
    other = type(meter.model)(meter.model.config).eval()
    with pytest.raises(ProfileError, match=r"made for another model, llama \(other weights\); make one"):
        msrnn.cache(other, f"tova:12,profile={profile}")
    with pytest.raises(ProfileError, match="3 layers, not 2"):
        check_profile(profile, llama(num_hidden_layers=2))


def test_a_profile_by_hand_needs_no_word_on_its_model(llama: Any, tmp_path: Path) -> None:
    file = tmp_path / "hand.json"
    file.write_text('{"capacities": [4, 8, 12]}')
    assert [p.capacity for p in msrnn.cache(llama(), f"tova,profile={file}").plan.policies] == [4, 8, 12]
    with pytest.raises(ValueError, match="average of 9, but the capacities by layer average 8"):
        msrnn.cache(llama(), f"tova:9,profile={file}")


def test_identity_is_small_and_stable(llama: Any) -> None:
    about = profile_identity(llama())
    assert len(about["weights"]) <= 48
    assert about == profile_identity(llama())
    assert json.loads(json.dumps(about)) == about


def test_there_is_always_a_text() -> None:
    assert len(default_text()) > 300_000
