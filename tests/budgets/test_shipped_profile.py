"""The profiles that come with the package: made for the bundled model, of the size they say, and better than none."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch

import msrnn
from msrnn.budgets.allocate import non_increasing
from msrnn.budgets.estimate import combine, every_second
from msrnn.budgets.profile import allocate_average, goal, open_profile, read_profile, shipped_profiles
from msrnn.eval.perplexity import perplexity
from msrnn.hf.identity import check_profile

ROOT = Path(__file__).parents[2]
NAME = "SmolLM2-135M-Instruct"
BY_HEAD = f"{NAME}-heads"
RECALL = f"{NAME}-recall"
pytestmark = pytest.mark.usefixtures("one_thread")


def test_its_sizes_are_what_it_says() -> None:
    profile = open_profile(NAME)
    assert (profile["policy"], profile["average"], profile["model"]["layers"]) == ("tova", 256, 30)
    for average in (64, 128, 256, 512, 1024, 4096):
        capacities = read_profile(NAME, average)
        assert len(capacities) == 30
        assert sum(capacities) == 30 * average


@pytest.mark.parametrize("name, counted", [(BY_HEAD, "perplexity"), (RECALL, "recall")])
def test_the_sizes_of_those_by_kv_head(name: str, counted: str) -> None:
    profile = open_profile(name)
    assert shipped_profiles() == [NAME, BY_HEAD, RECALL]
    assert (profile["policy"], profile["by"], profile["model"]["name"]) == ("fade", "head", NAME)
    assert goal(name) == counted
    for average in (32, 64, 128, 141, 256, 512, 562, 920, 1840, 4096):
        capacities: Any = read_profile(name, average)
        assert [len(heads) for heads in capacities] == [3] * 30
        assert sum(map(sum, capacities)) == 90 * average


def test_the_sizes_for_recall_follow_from_its_curves_and_keep_the_head_that_retrieves() -> None:
    profile = open_profile(RECALL)
    assert profile["capacities"] == allocate_average(profile["curves"], profile["average"])
    for average in (141, 281, 562, 920):  # bests of 64, 128, 256 and 512 plain slots
        capacities: Any = read_profile(RECALL, average)
        assert capacities[7][2] == 2048  # the most that its texts could show


def test_the_curves_by_kv_head_are_those_of_the_record() -> None:
    lines = (ROOT / "results" / "part" / "heads_estimates.jsonl").read_text().splitlines()
    parts: dict[tuple[str, int], list[np.ndarray]] = {}
    for line in map(json.loads, lines):
        for column, size in enumerate(line["sizes"]):
            parts.setdefault((line["estimate"], size), []).append(np.array(line["losses"])[..., column])
    profile = open_profile(BY_HEAD)
    sizes, curves = profile["grid"], np.array(profile["curves"])
    alone, together = (
        np.stack([np.mean(parts[name, size], 0) for size in few], -1)
        for name, few in (("alone", sizes), ("together", every_second(sizes)))
    )
    for layer, head in np.ndindex(30, 3):
        losses = combine(alone[layer, head].tolist(), together[layer, head].tolist(), sizes)
        falling = [loss for _, loss in non_increasing(dict(zip(sizes, losses, strict=True)))]
        assert curves[layer, head, :-1, 1].tolist() == pytest.approx(falling, rel=2e-3, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [("tova:64", NAME), ("fade:64", BY_HEAD)])
def test_it_fits_the_bundled_model_and_beats_the_plain_policy_on_a_text_it_never_saw(kind: str, name: str) -> None:
    model, tokenizer = msrnn.load()
    for shipped in shipped_profiles():
        check_profile(shipped, model)
    ids = torch.tensor(tokenizer(topics["exceptions"] + topics["objects"]).input_ids[:640])
    full, plain, profiled = (perplexity(model, ids, policy) for policy in ("full", kind, f"{kind},profile={name}"))
    assert full.mean < profiled.mean < plain.mean
