"""The research policies that ship, each by an example worked out by hand; see also tests/test_rules.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from msrnn.core import reference
from msrnn.core.attention import Attention
from msrnn.core.reference import Reference
from msrnn.core.rules import View, load_rule
from msrnn.policy import Policy, parse_policy


def view(
    policy: str = "tova:9",
    weights: list[float] | None = None,
    keys: list[list[float]] | None = None,
    values: list[list[float]] | None = None,
    scores: list[float] | None = None,
    now: int | None = None,
    memory: Tensor | None = None,
) -> View:
    """One unit with one head; columns hold positions 0, 1, ..."""
    count = len(weights or keys or values or [])
    numbers = {"dtype": torch.float64}
    rows = [torch.tensor(row or [[0.0, 0.0]] * count, **numbers)[None, None, None] for row in (keys, values)]
    return View(
        weights=torch.tensor(weights or [1 / count] * count, **numbers)[None, None, None],
        keys=rows[0],
        values=rows[1],
        positions=torch.arange(count)[None, None],
        visible=torch.ones(1, 1, count, dtype=torch.bool),
        now=torch.tensor([[[count - 1 if now is None else now]]]),
        scores=torch.tensor(scores or [0.0] * count, **numbers)[None, None],
        memory=torch.zeros(1, 1, count, 0, **numbers) if memory is None else memory,
        policy=parse_policy(policy),
    )


def scores(name: str, given: View) -> list[float]:
    return load_rule(name)(given)[0][0, 0].tolist()


def test_key_norm_keeps_short_keys() -> None:
    assert scores("key_norm", view(keys=[[3, 4], [0, 1], [6, 8]])) == [-5, -1, -10]


def test_value_norm_keeps_long_values() -> None:
    assert scores("value_norm", view(values=[[3, 4], [0, 1], [6, 8]])) == [5, 1, 10]


def test_output_aware_is_the_step_of_the_output() -> None:
    """Output 0.5 x 0 + 0.3 x 4 + 0.2 x 14 = 4. Without the last token it is (0 + 1.2) / 0.8 = 1.5, a step of 2.5."""
    given = view(weights=[0.5, 0.3, 0.2], values=[[0, 0], [4, 0], [14, 0]])
    assert scores("output_aware", given) == pytest.approx([4.0, 0.0, 2.5])


def test_output_aware_takes_a_token_with_all_the_weight() -> None:
    assert all(
        math.isfinite(score) for score in scores("output_aware", view(weights=[1.0, 0.0], values=[[1, 0], [2, 0]]))
    )


def test_a_window_forgets_what_older_queries_attended_to() -> None:
    """A token seen by query 0 alone has a score until query 32 takes its place in the ring."""
    ring = torch.zeros(1, 1, 2, 32, dtype=torch.float64)
    after: list[list[float]] = []
    for now in range(33):
        weights = [1.0, 0.0] if now == 0 else [0.0, 1.0]
        result, ring = load_rule("window_attention")(view(weights=weights, now=now, memory=ring))
        after.append([32 * score for score in result[0, 0].tolist()])
    assert after[0] == [1, 0]
    assert after[31] == [1, 31]
    assert after[32] == [0, 32]


def test_redundancy_drops_one_of_two_alike() -> None:
    """Cosines with the others: 1/2, 1/2 and 0 on average. Attention of 0.1 more does not outweigh that."""
    ring = torch.zeros(1, 1, 3, 32, dtype=torch.float64)
    given = view(weights=[0.4, 0.3, 0.3], keys=[[2, 0], [1, 0], [0, 5]], memory=ring)
    alike, alone = math.exp(0.5) / (2 * math.exp(0.5) + 1), 1 / (2 * math.exp(0.5) + 1)
    expected = [0.1 * w / 32 - 0.9 * r for w, r in zip([0.4, 0.3, 0.3], [alike, alike, alone], strict=True)]
    assert scores("redundancy", given) == pytest.approx(expected)


def test_lagged_scores_a_part_by_the_range_of_the_next() -> None:
    """Parts of 2 tokens. The next part spans 0 to 2 and 0 to 4, so the first keys are (0.5, 0.5) and (1, 0.25)."""
    keys = [[1, 2], [2, 1], [0, 4], [2, 0]]
    given = view("lagged:4,last=4", keys=keys, values=keys, scores=[7, 7, 7, 7])
    spread = 0.75 / math.sqrt(2)
    own = [1 / (1 + math.exp(spread)), math.exp(spread) / (1 + math.exp(spread))]
    assert scores("lagged", given) == pytest.approx([2 * own[0], 2 * own[1], 7, 7])


def test_lagged_scores_stay_between_parts() -> None:
    keys = [[1, 2], [2, 1], [0, 4], [2, 0], [9, 9]]
    given = view("lagged:4,last=4", keys=keys, values=keys, scores=[1, 2, 3, 4, 5])
    assert scores("lagged", given) == [1, 2, 3, 4, 5]


def test_random_evicts_all_ages_alike() -> None:
    """With 8 slots a token lives 9 steps on average, its own and 8 more; geometrically, as no age is favoured."""
    lives = [death - position for position, death in run("random:8", 3000).deaths[0].items()]
    assert sum(lives) / len(lives) == pytest.approx(8, rel=0.1)
    assert sum(life == 0 for life in lives) / len(lives) == pytest.approx(1 / 9, rel=0.2)


def test_momentum_adds_a_share_of_the_old_score() -> None:
    given = view("key_norm:9,momentum=0.5", keys=[[3, 4], [0, 1]], scores=[-8, 2])
    assert scores("key_norm", given) == [-9, 0]


def test_a_rule_that_remembers_must_say_so(tmp_path) -> None:
    file = tmp_path / "rule.py"
    for text, says in (
        ("MEMORY = 2\ndef score(view):\n    return view.scores", "MEMORY = 2, so it must give scores and memory"),
        ("def score(view):\n    return view.scores, view.memory", "MEMORY = 0, so it must give scores alone"),
        ("MEMORY = -1\ndef score(view):\n    return view.scores", "MEMORY = -1; it must be a whole number from 0"),
        ("MEMORY = 2\ndef score(view):\n    return view.scores, view.scores", r"gave memory \(1, 1, 1\); they must be"),
    ):
        file.write_text(text)
        load_rule.cache_clear()
        with pytest.raises(ValueError, match=says):
            run(f"{file}:8", 3)


def run(policy: str, length: int, heads: int = 1) -> Reference:
    rule: Policy = parse_policy(policy)
    state = reference.start(rule, heads, heads)
    rows = torch.ones(heads, length, 2, dtype=torch.float64)
    reference.run(state, rows, rows, rows, rule, Attention(1.0))
    return state
