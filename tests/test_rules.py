"""A research policy is one file: it runs exactly wherever a policy is taken, and says that it has no kernel."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import msrnn
from msrnn.core import rules
from msrnn.core.trace import ALIVE
from msrnn.eval.perplexity import token_nll
from tests.support.oracle import positions_held, slow_attention, slow_greedy, survivors

pytestmark = pytest.mark.usefixtures("one_thread")
RULE = '''
"""Attention with a long memory, times the distance between a key and the newest one."""

def score(view):
    newest = (view.positions == view.now).unsqueeze(2).unsqueeze(-1)
    last = (view.keys * newest).sum(3, keepdim=True)
    distance = (view.keys - last).norm(dim=-1).mean(2)
    return 0.9 * view.scores + view.weights.amax(2) * (1 + distance)
'''
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
IDS = torch.randint(3, 64, (1, 30), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["key_difference", "key_difference-head+1", "FILE", "FILE-head"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    file = tmp_path / "Distance.py"
    file.write_text(RULE)
    return request.param.replace("FILE", str(file)) + ":7,last=2"


def test_generate_is_the_definition(llama, policy: str) -> None:
    model = llama().double()
    want = slow_greedy(model, policy, IDS, 8)
    for chunk in (5, 128):
        cache = msrnn.cache(model, policy, chunk=chunk)
        assert model.generate(IDS, past_key_values=cache, **GREEDY).tolist() == want.tolist()
        assert cache.held == 7


@torch.no_grad()
def test_pieces_batches_and_traces(llama, policy: str) -> None:
    """Ragged rows, in pieces of several sizes, hold what each holds alone by the definition."""
    model = llama().double()
    rnn = msrnn.RNN(model, policy, chunk=4)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :11] = 0
    ids, state, start = torch.cat([IDS, IDS.flip(1)]), rnn.start(trace=True), 0
    for size in (3, 1, 13, 13):
        part = slice(start, start + size)
        _, state = rnn.step(ids[:, part], state, mask[:, part])
        start += size
    for row, alone in enumerate((ids[:1], ids[1:, 11:])):
        with slow_attention(model, policy) as layers:
            model(alone, use_cache=False)
        for index, reference in layers.items():
            assert survivors(state.layers[index], row) == positions_held(reference)
            deaths = state.trace.deaths[index][row]
            for unit, known in enumerate(reference.deaths):
                gone = {p: d for p, d in enumerate(deaths[unit].tolist()) if d != ALIVE}
                assert gone == known


def test_evaluation_and_engine(llama, policy: str) -> None:
    model = llama()
    whole = token_nll(model, IDS, policy, piece=30)
    assert torch.allclose(whole, token_nll(model, IDS, policy, piece=7), atol=1e-4)
    cache = msrnn.cache(model, policy)
    want = model.generate(IDS, past_key_values=cache, eos_token_id=-1, **GREEDY)[0, 30:].tolist()
    engine = msrnn.Engine(model, policy, batch=2)
    assert engine.generate([IDS[0].tolist()] * 3, max_new_tokens=8, stops=[]) == [want] * 3


def test_a_saved_state_goes_on(llama, policy: str, tmp_path: Path) -> None:
    model = llama()
    rnn = msrnn.RNN(model, policy)
    _, state = rnn.step(IDS, rnn.start())
    state.save(tmp_path / "state")
    want, _ = rnn.step(IDS[:, :5], state)
    got, _ = rnn.step(IDS[:, :5], rnn.load(tmp_path / "state"))
    assert torch.equal(got, want)


def test_it_says_that_there_is_no_kernel(llama, caplog: pytest.LogCaptureFixture) -> None:
    rules.announce_rule.cache_clear()
    with caplog.at_level(logging.WARNING, "msrnn"):
        msrnn.cache(llama(), "key_difference:8")
        msrnn.cache(llama(), "key_difference:9")
    assert [record.message for record in caplog.records] == [
        "msrnn: key_difference has no kernel yet: it runs in plain PyTorch, exact but slow"
    ]


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "there is no rule .*; msrnn has: .*key_difference"),
        ("x = 1", r"has no function score\(view\)"),
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
        ("def score(view):\n    return view.weights", r"gave scores .*; they must be"),
    ],
)
def test_bad_rules_are_refused(llama, tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "rule.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_with(llama(), f"{file}:8")


def read_with(model, policy: str) -> None:
    model(IDS, past_key_values=msrnn.cache(model, policy))
