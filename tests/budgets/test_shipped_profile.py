"""The profile that comes with the package: made for the bundled model, of the size it says, and better than none."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
import torch

import msrnn
from msrnn.budgets.profile import open_profile, read_profile
from msrnn.eval.perplexity import perplexity
from msrnn.hf.identity import check_profile

NAME = "SmolLM2-135M-Instruct"
pytestmark = pytest.mark.usefixtures("one_thread")


def test_its_sizes_are_what_it_says() -> None:
    profile = open_profile(NAME)
    assert (profile["policy"], profile["average"], profile["model"]["layers"]) == ("tova", 256, 30)
    for average in (64, 128, 256, 512, 1024, 4096):
        capacities = read_profile(NAME, average)
        assert len(capacities) == 30
        assert sum(capacities) == 30 * average


@pytest.mark.slow
def test_it_fits_the_bundled_model_and_beats_the_plain_policy_on_a_text_it_never_saw() -> None:
    model, tokenizer = msrnn.load()
    check_profile(NAME, model)
    ids = torch.tensor(tokenizer(topics["exceptions"] + topics["objects"]).input_ids[:640])
    full, plain, profiled = (
        perplexity(model, ids, policy) for policy in ("full", "tova:64", f"tova:64,profile={NAME}")
    )
    assert full.mean < profiled.mean < plain.mean
