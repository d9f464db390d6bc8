"""The definition, pinned by examples worked by hand.

Heads have one number per key. A token's key is ln(w), and a query of 1 gives it a weight in proportion to w: with
w = 4, 1, 2 in the state, the weights are 4/7, 1/7, 2/7.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from msrnn.core import reference
from msrnn.core.attention import Attention
from msrnn.core.reference import Reference
from msrnn.policy import parse_policy

PLAIN = Attention(1.0)


def run(
    policy: str,
    weights: list[float] | list[list[float]],
    queries: list[float] | None = None,
    values: list[float] | None = None,
    attention: Attention = PLAIN,
    oneshot: bool = False,
) -> tuple[Tensor, Reference]:
    """`weights` by token, or by head and token -> outputs [H, T] and the state after the last token."""
    heads = weights if isinstance(weights[0], list) else [weights]
    key = torch.tensor(heads, dtype=torch.float64).log()[..., None]
    query = torch.tensor(queries or [1.0] * key.shape[1], dtype=torch.float64).expand(len(heads), -1)[..., None]
    value = torch.tensor(values or list(range(key.shape[1])), dtype=torch.float64).expand(len(heads), -1)[..., None]
    state = reference.start(parse_policy(policy), len(heads), len(heads))
    output = reference.run(state, query, key, value, parse_policy(policy), attention, oneshot=oneshot)
    return output[..., 0], state


def held(state: Reference) -> list[list[int]]:
    return [[row.position for row in unit] for unit in state.rows]


def scores(state: Reference) -> list[float]:
    return [row.score for row in state.rows[0]]


def test_tova_drops_the_least_attended() -> None:
    output, state = run("tova:2", [4, 1, 2, 8])
    assert state.deaths == [{1: 2, 2: 3}]  # 4/7, 1/7, 2/7 after token 2; 4/14, 2/14, 8/14 after token 3
    assert held(state) == [[0, 3]]
    want = [0, 1 / 5, (1 + 2 * 2) / 7, (2 * 2 + 3 * 8) / 14]  # values are 0, 1, 2, 3; three are attended to, two stay
    assert output[0].tolist() == pytest.approx(want)


def test_tova_may_drop_the_newest() -> None:
    output, state = run("tova:2", [4, 4, 1])
    assert state.deaths == [{2: 2}]
    assert output[0, 2].item() == pytest.approx((4 + 2) / 9)  # it took part before it left


def test_the_older_of_equals_leaves() -> None:
    assert run("tova:2", [3, 1, 1])[1].deaths == [{1: 2}]


def test_first_tokens_are_protected() -> None:
    _, state = run("tova+1:2", [1, 4, 2])
    assert state.deaths == [{2: 2}]  # token 0 has the least, 1/7, but only 1 (4/7) and 2 (2/7) are free


def test_last_tokens_are_protected() -> None:
    _, state = run("tova:2,last=1", [4, 2, 1])
    assert state.deaths == [{1: 2}]  # token 2 has the least, 1/7, but is the newest


def test_window() -> None:
    assert run("window:2", [1, 9, 9, 9])[1].deaths == [{0: 2, 1: 3}]
    assert run("window+1:3", [1, 9, 9, 9, 9])[1].deaths == [{1: 3, 2: 4}]


def test_h2o_accumulates() -> None:
    _, state = run("h2o:2", [4, 1, 2, 8])
    assert state.deaths == [{1: 2, 2: 3}]  # after token 2: 1 + 4/5 + 4/7, 1/5 + 1/7, and 2/7 for the protected newest
    assert held(state) == [[0, 3]]
    assert scores(state) == pytest.approx([1 + 4 / 5 + 4 / 7 + 4 / 14, 8 / 14])


@pytest.mark.parametrize("momentum, victim", [(0, 0), (0.5, 2)])
def test_momentum(momentum: float, victim: int) -> None:
    """The last query of -1 turns the weights around: 1/2, 1, 1 of 5/2."""
    _, state = run(f"tova:2,momentum={momentum}", [2, 1, 1], queries=[1, 1, -1])
    # 0.5: token 0 has ((1/2 + 2/3) / 2 + 1/5 = 0.783, token 1 1/6 + 2/5 = 0.567, token 2 2/5
    assert state.deaths == [{victim: 2}]


def test_fade_is_h2o_that_forgets() -> None:
    """fade:2 protects the newest and multiplies scores by 1 - 1.5/2 = 1/4 at each step."""
    _, state = run("fade:2", [4, 1, 2])
    assert state.deaths == [{1: 2}]
    first = ((1 / 4 + 4 / 5) / 4) + 4 / 7
    assert scores(state) == pytest.approx([first, 2 / 7])


def test_a_layer_decides_once_and_heads_on_their_own() -> None:
    weights = [[4, 1, 2], [1, 4, 2]]
    assert run("tova:2", weights)[1].deaths == [{2: 2}]  # means: 5/14, 5/14, 4/14
    assert run("tova-head:2", weights)[1].deaths == [{1: 2}, {0: 2}]


def test_gain_multiplies_the_weight() -> None:
    _, state = run("tova:2,gain=value_norm", [4, 1, 2], values=[1, -8, 1])
    assert state.deaths == [{2: 2}]  # 4/7 x 1, 1/7 x 8, 2/7 x 1


def test_the_models_own_window_comes_first() -> None:
    """With a window of 2 a query sees one older token: token 0 cannot be seen by token 2, and leaves after token 1."""
    output, state = run("tova:5", [4, 1, 2], attention=Attention(1.0, window=2))
    assert state.deaths == [{0: 1, 1: 2}]
    assert output[0].tolist() == pytest.approx([0, 1 / 5, (1 + 2 * 2) / 3])


def test_a_sink_takes_its_share() -> None:
    """A learned sink logit of 0 adds 1 to every sum."""
    sinks = torch.zeros(1, dtype=torch.float64)
    output, state = run("h2o:2", [3, 4], values=[1, 1], attention=Attention(1.0, sinks=sinks))
    assert output[0].tolist() == pytest.approx([3 / 4, 7 / 8])
    assert scores(state) == pytest.approx([3 / 4 + 3 / 8, 4 / 8])


def test_a_soft_cap_bends_logits() -> None:
    output, _ = run("full", [1, math.e**2], values=[0, 1], attention=Attention(1.0, softcap=1.0))
    bent = math.tanh(2)
    assert output[0, 1].item() == pytest.approx(math.exp(bent) / (1 + math.exp(bent)))


def test_oneshot_drops_at_the_end_of_a_call() -> None:
    _, state = run("tova:2", [4, 1, 2, 8], oneshot=True)
    assert state.deaths == [{1: 3, 2: 3}]  # 4/15, 1/15, 2/15, 8/15 of the last query


def test_a_rule_has_a_score_of_its_own() -> None:
    """Two keys point the same way, the third away: the older of the two equals is most like the mean, and leaves."""
    key = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    policy = parse_policy("key_difference:2")
    state = reference.start(policy, 1, 1)
    reference.run(state, key, key, key, policy, PLAIN)
    assert state.deaths == [{0: 2}]


def test_what_leaves_is_blended_into_a_residual() -> None:
    """Two slots; with each token that leaves, those before it count half as much."""
    output, state = run("tova:2,residual=0.5", [4, 1, 2, 8, 8])
    assert state.deaths == [{1: 2, 2: 3, 0: 4}]
    # token 3 attends to 4, 2, 8 and to the residual, which is token 1: key ln 1, value 1, weight 1
    assert output[0, 3].item() == pytest.approx((1 * 1 + 2 * 2 + 8 * 3) / 15)
    # then token 2 joins: 1.5 tokens, key (0.5 ln 1 + ln 2) / 1.5, value (0.5 x 1 + 2) / 1.5; it counts as 1.5 tokens
    weight, value = 1.5 * 2 ** (1 / 1.5), 2.5 / 1.5
    assert output[0, 4].item() == pytest.approx((8 * 3 + 8 * 4 + weight * value) / (4 + 8 + 8 + weight))
    residual = state.residuals[0]
    assert residual is not None
    assert residual.number == 1.75
    assert residual.key.item() == pytest.approx((0.5 * math.log(2) + math.log(4)) / 1.75)
    assert residual.value.item() == pytest.approx((0.25 * 1 + 0.5 * 2 + 0) / 1.75)


def test_without_evictions_there_is_no_residual() -> None:
    output, state = run("tova:3,residual=1", [4, 1, 2])
    assert state.residuals == [None]
    assert output.tolist() == run("tova:3", [4, 1, 2])[0].tolist()
