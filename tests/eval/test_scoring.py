"""Perplexity in batches against straightforward loops, and positions against their definition."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from msrnn.eval import positions
from msrnn.eval.generation import pad_left, write
from msrnn.eval.scoring import short_nll, token_nll
from msrnn.policy import parse
from tests.support import tiny_eval

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_eval.model().double()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 257, (3, 56), generator=torch.Generator().manual_seed(5))


def plain_loop(model, row):
    """The plain model on the whole text at once, no cache at all."""
    with torch.no_grad():
        logits = model(row[None], use_cache=False).logits[0, :-1]
    return cross_entropy(logits, row[1:], reduction="none")


@pytest.mark.parametrize("piece", [1, 16, 55, 56, 200])
def test_the_plain_model_in_batches_and_pieces(model, ids, piece):
    found = token_nll(model, ids, piece=piece)
    wanted = torch.stack([plain_loop(model, row) for row in ids])
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("policy", ["tova:12", "tova-head:12", "window:12", "window+4:12", "h2o:12", "h2o-layer:12"])
def test_every_policy_against_the_definition_one_token_at_a_time(model, ids, policy):
    found = token_nll(model, ids[:2], policy, piece=20)
    wanted = torch.stack([positions.exact_nll(model, row, parse(policy), lambda gap: gap) for row in ids[:2]])
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)
    assert (found[0] - token_nll(model, ids[:1])[0]).abs().max() > 0.1  # the bound is felt


@pytest.mark.parametrize("context", [2, 10, 16, 56, 100])
def test_the_short_context_is_pieces_read_alone(model, ids, context):
    found = short_nll(model, ids, context, piece=8)
    for row, numbers in zip(ids, found, strict=True):
        pieces = [part for part in row.split(context) if len(part) > 1]
        wanted = torch.cat([plain_loop(model, part) for part in pieces])
        torch.testing.assert_close(numbers.double(), wanted, atol=1e-4, rtol=1e-5)


def test_a_text_of_one_token_is_refused(model):
    with pytest.raises(ValueError, match="at least 2"):
        token_nll(model, torch.zeros(2, 1, dtype=torch.long))


@pytest.mark.parametrize("name", ["gaps", "relative"])
@pytest.mark.parametrize("policy", ["tova:8", "h2o:8", "window+2:8"])
def test_frozen_positions_are_exact_in_pieces_of_one_token(model, ids, policy, name):
    wanted = positions.exact_nll(model, ids[0], parse(policy), positions.GAPS[name])
    found = token_nll(model, ids[:1], policy, piece=1, positions=positions.mode(name, model))[0]
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)
    plain = token_nll(model, ids[:1], policy)[0]
    assert (found - plain).abs().max() > 0.1


def test_frozen_positions_in_batches_are_those_of_single_rows(model, ids):
    found = token_nll(model, ids, "tova:16", piece=8, positions=positions.mode("gaps", model))
    for row, wanted in zip(ids, found, strict=True):
        alone = token_nll(model, row[None], "tova:16", piece=8, positions=positions.mode("gaps", model))[0]
        torch.testing.assert_close(alone, wanted, atol=1e-4, rtol=1e-5)


def test_the_papers_gaps_by_hand():
    births = torch.tensor([[0, 1, 30, 31, -1, 45]])
    found = positions.places(births, 46, positions.paper_gap, 100.0)[0]
    lnln = lambda gap: torch.tensor(float(gap), dtype=torch.float64).log().log()  # noqa: E731
    at45 = 99.0
    at31 = at45 - lnln(14)
    at30, at1 = at31 - 1, at31 - 1 - lnln(29)
    wanted = torch.stack([at1 - 1, at1, at30, at31, torch.tensor(at45, dtype=torch.float64)])
    torch.testing.assert_close(found[[0, 1, 2, 3, 5]], wanted)
    assert torch.equal(positions.paper_gap(torch.tensor([1.0, 10.0])), torch.tensor([1.0, 10.0]))


def test_relative_places_are_ranks():
    births = torch.tensor([[7, -1, 2, 9]])
    found = positions.places(births, 12, torch.ones_like, 4.0)[0]
    assert found[[2, 0, 3]].tolist() == [1.0, 2.0, 3.0]


def test_the_plain_model_takes_no_other_positions(model, ids):
    with pytest.raises(ValueError, match="for a bounded state"):
        token_nll(model, ids, positions=positions.mode("gaps", model))


@pytest.mark.parametrize("engine", [False, True])
def test_written_text_does_not_depend_on_the_batch(engine):
    model, tokenizer = tiny_eval.model(), tiny_eval.tokenizer()
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41], list(range(60, 80))]
    for hot in (0.0, 1.0):
        settings = {"engine": engine} | ({"temperature": hot, "seeds": [1, 2, 3]} if hot else {})
        together = write(model, tokenizer, prompts, "tova:8", 12, **settings)
        for number, prompt in enumerate(prompts):
            own = {"engine": engine} | ({"temperature": hot, "seeds": [number + 1]} if hot else {})
            assert write(model, tokenizer, [prompt], "tova:8", 12, **own)[0] == together[number]


@pytest.mark.parametrize("policy", [None, "tova:8", "window+2:8"])
def test_the_engine_and_generate_write_the_same(policy):
    model, tokenizer = tiny_eval.model(), tiny_eval.tokenizer()
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41], list(range(60, 80))]
    one, other = (write(model, tokenizer, prompts, policy, 20, engine=engine) for engine in (False, True))
    assert one == other


def test_sampling_is_fair():
    from msrnn.eval.generation import SeededNoise

    scores = torch.tensor([[0.0, 1.0, 2.0]]).expand(4000, 3)
    noise = SeededNoise(range(4000), 0.5, torch.device("cpu"))
    found = noise(torch.empty(0), scores).argmax(-1).bincount(minlength=3) / 4000
    torch.testing.assert_close(found, (scores[0] / 0.5).softmax(0), atol=0.03, rtol=0)


def test_padding_stands_on_the_left():
    ids, mask = pad_left([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_an_answer_ends_at_the_end_token():
    from msrnn.eval.generation import _output

    tokenizer = tiny_eval.tokenizer()
    letters = tokenizer("ab")["input_ids"]
    assert _output(tokenizer, [*letters, 0, 0], {0}).ids == letters
    assert _output(tokenizer, [*letters, 0, 0], {0}).ended
    assert not _output(tokenizer, letters, {0}).ended
