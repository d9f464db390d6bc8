"""RoPE positions past the trained length, against their definition."""

from __future__ import annotations

import pytest
import torch

from msrnn.eval import positions
from msrnn.eval.perplexity import token_nll
from msrnn.policy import parse_policy
from tests.support import tiny_eval

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_eval.model().double()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 257, (3, 56), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ["gaps", "relative"])
@pytest.mark.parametrize("policy", ["tova:8", "h2o:8", "window+2:8", "fade:8,kv=int8", "tova:8,kv=k8v4"])
def test_piecewise_positions_are_exact_in_pieces_of_one_token(model, ids, policy, name):
    expected = positions.exact_nll(model, ids[0], parse_policy(policy), positions.GAPS[name])
    result = token_nll(model, ids[:1], policy, piece=1, positions=positions.scheme(name, model))[0]
    torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-5)
    plain = token_nll(model, ids[:1], policy)[0]
    assert (result - plain).abs().max() > 0.1


def test_piecewise_positions_in_batches_are_those_of_single_rows(model, ids):
    result = token_nll(model, ids, "tova:16", piece=8, positions=positions.scheme("gaps", model))
    for row, expected in zip(ids, result, strict=True):
        alone = token_nll(model, row[None], "tova:16", piece=8, positions=positions.scheme("gaps", model))[0]
        torch.testing.assert_close(alone, expected, atol=1e-4, rtol=1e-5)


def test_the_papers_gaps_by_hand():
    held = torch.tensor([[0, 1, 30, 31, -1, 45]])
    result = positions.rotary_positions(held, 46, positions.paper_gap, 100.0)[0]
    lnln = lambda gap: torch.tensor(float(gap), dtype=torch.float64).log().log()  # noqa: E731
    at45 = 99.0
    at31 = at45 - lnln(14)
    at30, at1 = at31 - 1, at31 - 1 - lnln(29)
    expected = torch.stack([at1 - 1, at1, at30, at31, torch.tensor(at45, dtype=torch.float64)])
    torch.testing.assert_close(result[[0, 1, 2, 3, 5]], expected)
    assert torch.equal(positions.paper_gap(torch.tensor([1.0, 10.0])), torch.tensor([1.0, 10.0]))


def test_relative_positions_are_ranks():
    held = torch.tensor([[7, -1, 2, 9]])
    result = positions.rotary_positions(held, 12, torch.ones_like, 4.0)[0]
    assert result[[2, 0, 3]].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ["gaps", "relative"])
def test_a_residual_has_no_position_to_change(model, ids, name):
    with pytest.raises(ValueError, match="use positions = 'plain'"):
        token_nll(model, ids, "blend:8", positions=positions.scheme(name, model))


def test_the_plain_model_takes_no_other_positions(model, ids):
    with pytest.raises(ValueError, match="for a bounded state"):
        token_nll(model, ids, positions=positions.scheme("gaps", model))
