"""Evictions and scores seen from outside the recurrence, against the definition."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import msrnn
from msrnn.plan import per_layer
from msrnn.play.observe import fork, observe
from tests.support.models import tiny_llama
from tests.support.oracle import slow_attention

POLICIES = [
    "tova:6", "tova+2:7", "h2o:6", "h2o-layer:6", "tova-head:5", "tova-query-head:5", "window+1:4", "fade:8", "full",
    "key_difference:6", "tova:6,gain=value_norm", "h2o:8,gain=value_norm", "blend:8", "blend-layer:6",
    "tova:6,residual=0.9", "blend:8,kv=int8",
    per_layer("fade", [[5, 12], [12, 4], [9, 9]]), per_layer("tova-head", [[3, 7], [20, 2], 6]),
    per_layer("h2o,kv=int8", [[4, 9]] * 3), per_layer("key_difference-head", [[3, 7]] * 3),
    per_layer("blend", [[5, 12]] * 3),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_evictions_and_scores_are_those_of_the_definition(policy):
    model = tiny_llama()
    ids = torch.randint(0, 64, (1, 29), generator=torch.Generator().manual_seed(1))
    state = msrnn.RNN(model, policy).start()
    policy = policy if isinstance(policy, str) else [str(one) for one in policy.policies]
    observers = observe(state)
    deaths = [[{} for _ in range(4)] for _ in observers]
    start = 0
    for size in (7, 1, 1, 13, 7):
        with torch.no_grad():
            model(ids[:, start : start + size], past_key_values=state.cache, use_cache=True)
        for layer, observer in enumerate(observers):
            for unit, step in (observer.evictions.positions >= 0).nonzero().tolist():
                deaths[layer][unit][int(observer.evictions.positions[unit, step])] = start + step
        start += size
    with torch.no_grad(), slow_attention(model, policy) as definition:
        model(ids, use_cache=False)
    assert sum(map(len, deaths[0])) > 0 or policy == "full"
    for layer, observer in enumerate(observers):
        assert definition[layer].deaths == deaths[layer][: len(definition[layer].deaths)]
        for unit, rows in enumerate(definition[layer].rows):
            held = dict(zip(observer.held.positions[unit].tolist(), observer.held.scores[unit].tolist(), strict=True))
            held.pop(-1, None)
            assert held == {row.position: pytest.approx(row.score, rel=1e-5, abs=1e-6) for row in rows}


def test_what_the_window_of_the_model_hides_joins_no_residual():
    """A policy that protects the newest keeps older tokens, so that some leave by the window, others are chosen."""
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=12, initializer_range=0.3, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(3)
    model, policy = MistralForCausalLM(config).eval(), "tova:8,residual=0.9"
    ids = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(4))
    state = msrnn.RNN(model, policy).start()
    observers = observe(state)
    for piece in ids.split((11, 1, 28), 1):
        with torch.no_grad():
            model(piece, past_key_values=state.cache, use_cache=True)
    with torch.no_grad(), slow_attention(model, policy) as definition:
        model(ids, use_cache=False)
    for layer, observer in enumerate(observers):
        (deaths,), (rows,) = definition[layer].deaths, definition[layer].rows
        assert 0 < sum(step == token + 11 for token, step in deaths.items()) < len(deaths)
        held = dict(zip(observer.held.positions[0].tolist(), observer.held.scores[0].tolist(), strict=True))
        held.pop(-1, None)
        assert held == {row.position: pytest.approx(row.score, rel=1e-5, abs=1e-6) for row in rows}


@pytest.mark.parametrize("policy", ["tova:6", "h2o:8", "fade:8", "tova-head:5"])
def test_the_token_that_leaves_has_the_lowest_score_of_those_free_to_leave(policy):
    model, rule = tiny_llama(), msrnn.Policy.parse(policy)
    ids = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(2))
    state = msrnn.RNN(model, policy).start()
    observers = observe(state)
    evictions = 0
    for step in range(40):
        with torch.no_grad():
            model(ids[:, step : step + 1], past_key_values=state.cache, use_cache=True)
        for observer in observers:
            left, scores = observer.evictions.positions[:, 0], observer.evictions.scores[:, 0]
            for unit in (left >= 0).nonzero()[:, 0].tolist():
                positions, held = observer.held.positions[unit], observer.held.scores[unit]
                free = (positions >= rule.first) & (positions <= step - rule.last)
                assert (held[free] >= scores[unit] - 1e-6).all()
                evictions += 1
    assert evictions > 50


def test_a_fork_reports_to_nobody():
    model = tiny_llama()
    rnn = msrnn.RNN(model, "tova:6")
    state = rnn.start()
    observers = observe(state)
    _, state = rnn.step(torch.arange(12)[None], state)
    before = observers[0].held.positions.clone()
    rnn.step(torch.arange(9)[None], fork(state))
    assert torch.equal(observers[0].held.positions, before)
    _, state = rnn.step(torch.arange(3)[None], state)
    assert observers[0].held.positions.max() == 14


def test_heads_with_slots_of_their_own_are_units_as_in_the_trace():
    model = tiny_llama()
    rnn = msrnn.RNN(model, per_layer("fade", [[5, 40], [30, 6], [9, 9]]))
    ids = torch.randint(0, 64, (1, 70), generator=torch.Generator().manual_seed(3))
    state, traced = rnn.start(), rnn.start(trace=True)
    observers = observe(state)
    for piece in ids.split((33, 1, 36), 1):
        (_, state), (_, traced) = (rnn.step(piece, one) for one in (state, traced))
    for layer, observer in enumerate(observers):
        held = traced.trace.held(layer, 69)[0]
        for positions, expected in zip(observer.held.positions, held, strict=True):
            assert sorted(positions[positions >= 0].tolist()) == expected.nonzero()[:, 0].tolist()
        left = observer.evictions.positions  # in the last piece
        for unit, step in (left >= 0).nonzero().tolist():
            assert traced.trace.deaths[layer][0, unit, left[unit, step]] == 34 + step
        assert (left >= 0).sum() == (traced.trace.deaths[layer] < 70).sum() - (traced.trace.deaths[layer] < 34).sum()
    assert [len(o.held.positions[0]) for o in observers] == [len(o.held.scores[1]) for o in observers]
