"""Generation of the evaluation: rows do not depend on their batch, and sampling is fair."""

from __future__ import annotations

import pytest
import torch

from msrnn.eval.generation import GumbelNoise, _output, generate, pad_left
from tests.support import tiny_eval

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("engine", [False, True])
def test_generated_text_does_not_depend_on_the_batch(engine):
    model, tokenizer = tiny_eval.model(), tiny_eval.tokenizer()
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41], list(range(60, 80))]
    for temperature in (0.0, 1.0):
        settings = {"engine": engine} | ({"temperature": temperature, "seeds": [1, 2, 3]} if temperature else {})
        together = generate(model, tokenizer, prompts, "tova:8", 12, **settings)
        for number, prompt in enumerate(prompts):
            own = {"engine": engine} | ({"temperature": temperature, "seeds": [number + 1]} if temperature else {})
            assert generate(model, tokenizer, [prompt], "tova:8", 12, **own)[0] == together[number]


@pytest.mark.parametrize("policy", [None, "tova:8", "window+2:8"])
def test_the_engine_and_transformers_generate_the_same(policy):
    model, tokenizer = tiny_eval.model(), tiny_eval.tokenizer()
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41], list(range(60, 80))]
    one, other = (generate(model, tokenizer, prompts, policy, 20, engine=engine) for engine in (False, True))
    assert one == other


def test_sampling_is_fair():
    scores = torch.tensor([[0.0, 1.0, 2.0]]).expand(4000, 3)
    noise = GumbelNoise(range(4000), 0.5, torch.device("cpu"))
    shares = noise(torch.empty(0), scores).argmax(-1).bincount(minlength=3) / 4000
    torch.testing.assert_close(shares, (scores[0] / 0.5).softmax(0), atol=0.03, rtol=0)


def test_padding_stands_on_the_left():
    ids, mask = pad_left([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_an_answer_ends_at_the_end_token():
    tokenizer = tiny_eval.tokenizer()
    letters = tokenizer("ab")["input_ids"]
    assert _output(tokenizer, [*letters, 0, 0], {0}).ids == letters
    assert _output(tokenizer, [*letters, 0, 0], {0}).ended
    assert not _output(tokenizer, letters, {0}).ended
