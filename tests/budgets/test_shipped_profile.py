"""The profiles that come with the package: made for the bundled model, of the size they say, and better than none."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

import msrnn
from msrnn.budgets.profile import open_profile, read_profile, shipped_profiles
from msrnn.eval.perplexity import perplexity
from msrnn.hf.identity import check_profile

NAME = "SmolLM2-135M-Instruct"
BY_HEAD = f"{NAME}-heads"
pytestmark = pytest.mark.usefixtures("one_thread")


def test_its_sizes_are_what_it_says() -> None:
    profile = open_profile(NAME)
    assert (profile["policy"], profile["average"], profile["model"]["layers"]) == ("tova", 256, 30)
    for average in (64, 128, 256, 512, 1024, 4096):
        capacities = read_profile(NAME, average)
        assert len(capacities) == 30
        assert sum(capacities) == 30 * average


def test_the_sizes_of_the_one_by_kv_head() -> None:
    profile = open_profile(BY_HEAD)
    assert shipped_profiles() == [NAME, BY_HEAD]
    assert (profile["policy"], profile["by"], profile["model"]) == ("fade", "head", open_profile(NAME)["model"])
    for average in (32, 64, 128, 141, 256, 512, 562, 920, 1840, 4096):
        capacities: Any = read_profile(BY_HEAD, average)
        assert [len(heads) for heads in capacities] == [3] * 30
        assert sum(map(sum, capacities)) == 90 * average


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [("tova:64", NAME), ("fade:64", BY_HEAD)])
def test_it_fits_the_bundled_model_and_beats_the_plain_policy_on_a_text_it_never_saw(kind: str, name: str) -> None:
    model, tokenizer = msrnn.load()
    check_profile(name, model)
    ids = torch.tensor(tokenizer(topics["exceptions"] + topics["objects"]).input_ids[:640])
    full, plain, profiled = (perplexity(model, ids, policy) for policy in ("full", kind, f"{kind},profile={name}"))
    assert full.mean < profiled.mean < plain.mean
