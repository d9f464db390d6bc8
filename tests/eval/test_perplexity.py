"""Perplexity of a text in pieces, under the plain model and under bounded states."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

import msrnn
from msrnn.eval import positions
from msrnn.eval.perplexity import Score, new_cache, perplexity, score, short_context_nll, token_nll
from msrnn.policy import parse_policy
from tests.support import tiny_eval

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_eval.model().double()


@pytest.fixture(scope="module")
def rows():
    return torch.randint(0, 257, (3, 56), generator=torch.Generator().manual_seed(5))


def plain_nll(model, row):
    """The plain model on the whole text at once, without a cache."""
    with torch.no_grad():
        logits = model(row[None], use_cache=False).logits[0, :-1]
    return cross_entropy(logits, row[1:], reduction="none")


@pytest.mark.parametrize("piece", [1, 16, 55, 56, 200])
def test_the_plain_model_in_batches_and_pieces(model, rows, piece):
    result = token_nll(model, rows, piece=piece)
    expected = torch.stack([plain_nll(model, row) for row in rows])
    torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("policy", ["tova:12", "tova-head:12", "window:12", "window+4:12", "h2o:12", "h2o-layer:12"])
def test_every_policy_against_the_definition_one_token_at_a_time(model, rows, policy):
    result = token_nll(model, rows[:2], policy, piece=20)
    expected = torch.stack([positions.exact_nll(model, row, parse_policy(policy), lambda gap: gap) for row in rows[:2]])
    torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-5)
    assert (result[0] - token_nll(model, rows[:1])[0]).abs().max() > 0.1  # the capacity makes a difference


@pytest.mark.parametrize("context", [2, 10, 16, 56, 100])
def test_the_short_context_is_pieces_read_alone(model, rows, context):
    result = short_context_nll(model, rows, context, piece=8)
    for row, losses in zip(rows, result, strict=True):
        pieces = [part for part in row.split(context) if len(part) > 1]
        expected = torch.cat([plain_nll(model, part) for part in pieces])
        torch.testing.assert_close(losses.double(), expected, atol=1e-4, rtol=1e-5)


def test_a_text_of_one_token_is_refused(model):
    with pytest.raises(ValueError, match="at least 2"):
        token_nll(model, torch.zeros(2, 1, dtype=torch.long))


def ids(length: int) -> torch.Tensor:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(3))


def test_perplexity_is_that_of_one_forward(llama: Any) -> None:
    model, text = llama(), ids(150)
    with torch.no_grad():
        expected = cross_entropy(model(text[None]).logits[0, :-1].double(), text[1:], reduction="sum")
    for piece in (1, 7, 75, 149, 150, 151, 1000):  # 149 leaves a piece whose only token predicts nothing
        result = perplexity(model, text, piece=piece)
        assert result.tokens == 149
        assert result.nll == pytest.approx(float(expected), rel=1e-5)
        assert result.perplexity == pytest.approx(math.exp(float(expected) / 149), rel=1e-4)


@pytest.mark.parametrize("policy", ["tova:150", "window:150", "h2o:150", "full"])
def test_a_state_with_room_for_all_scores_as_the_plain_model(llama: Any, policy: str) -> None:
    plain, bounded = (perplexity(llama(), ids(150).tolist(), choice, piece=40) for choice in (None, policy))
    assert bounded.perplexity == pytest.approx(plain.perplexity, rel=1e-4)


@pytest.mark.parametrize("policy", ["tova:16", "window+4:16", "h2o:16"])
def test_the_piece_does_not_matter_to_a_bounded_state(llama: Any, policy: str) -> None:
    model = llama()
    scores = [perplexity(model, ids(150), policy, piece=piece).nll for piece in (1, 40, 150)]
    assert scores[1:] == pytest.approx([scores[0]] * 2, rel=1e-5)
    assert scores[0] != pytest.approx(perplexity(model, ids(150)).nll, rel=1e-5)


def test_the_cache_has_read_the_text_and_progress_is_reported(llama: Any) -> None:
    model, steps = llama(), []
    for cache in (new_cache(model), msrnn.cache(model, "tova:16")):
        score(model, ids(100)[None], cache, piece=30, progress=steps.append)
        assert cache.get_seq_length() == 100
    assert steps == [30, 30, 30, 10] * 2
    assert isinstance(new_cache(model), DynamicCache)


def test_scoring_in_half_precision_sums_in_double(llama: Any) -> None:
    text = ids(150)
    half, whole = (perplexity(llama().to(dtype), text, "tova:40") for dtype in (torch.bfloat16, torch.float32))
    assert half.mean == pytest.approx(whole.mean, rel=0.05)
    assert Score(nll=10.0, tokens=4, seconds=1.0).perplexity == pytest.approx(math.exp(2.5))


def test_what_cannot_be_scored_is_refused(llama: Any) -> None:
    model = llama()
    for text, piece, reason in (
        ([1], 10, "1 tokens; perplexity needs at least 2"),
        (torch.zeros(2, 5, dtype=torch.long), 10, r"one text, .* not \(2, 5\)"),
        ([1, 2], 0, "piece is 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            perplexity(model, text, piece=piece)


@pytest.mark.parametrize("policy", [None, "tova:12"])
def test_a_score_is_the_sum_of_the_tokens_losses(model, rows, policy):
    cache = new_cache(model, policy)
    total = score(model, rows[0], cache, piece=20)
    assert total.nll == pytest.approx(float(token_nll(model, rows[:1], policy).double().sum()), rel=1e-6)
    assert (total.tokens, cache.get_seq_length()) == (55, 56)
