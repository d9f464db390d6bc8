"""A prompt read in rounds of chunks: the same states and logits as the recurrence in one go."""

from __future__ import annotations

import pytest
import torch

from msrnn.engine.pipeline import Wavefront
from msrnn.rnn import RNN

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("policy", ["tova:8", "window+2:8", "h2o:8", ["tova:5", "h2o:9", "window:7"]])
def test_rounds_are_the_recurrence(llama, policy):
    rnn = RNN(llama(), policy, piece=1000)
    front = Wavefront(rnn, chunk=6, lanes=3, laps=2)
    assert front.before == max(p.capacity for p in rnn.plan.policies)
    for seed, length in ((1, 70), (2, 47), (3, 33), (4, 10), (5, 3)):  # each begins again in the memory of the last
        ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(seed))
        want, state = rnn.step(ids, rnn.start())
        heard = []
        got, cache = front.read(ids, heard.append)
        assert sum(heard) == length
        assert torch.allclose(got, want, atol=1e-4)
        for mine, theirs in zip(cache.bounded, state.cache.bounded, strict=True):
            assert torch.equal(mine.state.positions.sort().values, theirs.state.positions.sort().values)
            assert torch.equal(mine.state.seen, theirs.state.seen)
            assert mine.state.fed == theirs.state.fed == length


@pytest.mark.parametrize("policy", ["tova:6", "tova-query-head:6", "h2o:20", "window:6", "tova:1"])
def test_a_window_of_the_models_own(policy):
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "sliding_window": 10}
    torch.manual_seed(0)
    rnn = RNN(MistralForCausalLM(MistralConfig(**shape, **heads)).eval(), policy)
    ids = torch.randint(0, 64, (1, 50), generator=torch.Generator().manual_seed(1))
    want, _ = rnn.step(ids, rnn.start())
    got, _ = Wavefront(rnn, chunk=6, lanes=2, laps=2).read(ids)
    assert torch.allclose(got, want, atol=1e-4)


def test_compiled_it_reads_the_same(llama, monkeypatch):
    whole, made = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda *a, **more: made.append(a) or whole(*a, backend="eager", **more))
    rnn = RNN(llama(num_hidden_layers=2), "tova:8", piece=1000)
    front = Wavefront(rnn, chunk=6, lanes=2, laps=2, compiled=True)
    ids = torch.randint(0, 64, (1, 47), generator=torch.Generator().manual_seed(1))
    want, _ = rnn.step(ids, rnn.start())
    assert torch.allclose(front.read(ids)[0], want, atol=1e-4)
    assert len(made) == 1


def test_what_it_cannot_read_is_refused(llama):
    model = llama()
    with pytest.raises(ValueError, match="keeps every token"):
        Wavefront(RNN(model, "full"))
    with pytest.raises(ValueError, match="lanes is 0"):
        Wavefront(RNN(model, "tova:8"), lanes=0)
    with pytest.raises(ValueError, match="laps is 0"):
        Wavefront(RNN(model, "tova:8"), laps=0)


def test_rounds_have_few_sizes(llama):
    front = Wavefront(RNN(llama(), "tova:8"), chunk=6, lanes=3, laps=4)
    assert front.fits(26)
    assert not front.fits(25)
    sizes = {chunks: front._size(6 * chunks + 5) for chunks in (0, 1, 3, 4, 5, 6, 11, 12, 13, 100)}
    assert sizes == {0: 0, 1: 1, 3: 3, 4: 3, 5: 3, 6: 6, 11: 6, 12: 12, 13: 12, 100: 12}
