"""A prompt read in rounds of chunks: the same states and logits as the recurrence in one go."""

from __future__ import annotations

import pytest
import torch

from msrnn.rnn import RNN
from msrnn.wavefront import Wavefront

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("policy", ["tova:8", "window+2:8", "h2o:8", ["tova:5", "h2o:9", "window:7"]])
def test_rounds_are_the_recurrence(llama, policy):
    rnn = RNN(llama(), policy, chunk=6, piece=1000)
    front = Wavefront(rnn, batch=2, lanes=3)
    assert front.before == max(p.capacity for p in rnn.plan.policies)
    for seed, length in ((1, 70), (2, 47), (3, 33)):  # the second begins again in the memory of the first
        ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed))
        want, state = rnn.step(ids, rnn.start())
        got, cache = front.read(ids)
        assert torch.allclose(got, want, atol=1e-4)
        for mine, theirs in zip(cache.bounded, state.cache.bounded, strict=True):
            assert torch.equal(mine.state.positions.sort().values, theirs.state.positions.sort().values)
            assert torch.equal(mine.state.seen, theirs.state.seen)
            assert mine.state.fed == theirs.state.fed == length


def test_what_it_cannot_read_is_refused(llama):
    model = llama()
    with pytest.raises(ValueError, match="keeps every token"):
        Wavefront(RNN(model, "full"))
    with pytest.raises(ValueError, match="lanes is 0"):
        Wavefront(RNN(model, "tova:8"), lanes=0)
    front = Wavefront(RNN(model, "tova:8", chunk=6), lanes=2)
    assert front.fits(1, 20)
    assert not front.fits(1, 19)
    assert not front.fits(2, 20)
    with pytest.raises(ValueError, match="too few"):
        front.read(torch.zeros(1, 19, dtype=torch.int64))
