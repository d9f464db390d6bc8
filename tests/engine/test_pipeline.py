"""Pipelined prefill: the same slots and logits as the recurrence without a pipeline."""

from __future__ import annotations

import pytest
import torch

from msrnn.core import head_groups
from msrnn.engine.pipeline import PipelinedPrefill
from msrnn.plan import per_layer
from msrnn.rnn import RNN

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "policy",
    [
        "tova:8",
        "window+2:8",
        "h2o:8",
        "h2o:8,gain=value_norm",
        "h2o:8,kv=int8",
        "tova:8,kv=k8v4",
        ["tova:5", "h2o:9", "window:7"],
    ],
)
def test_rounds_equal_the_recurrence(llama, policy):
    model = llama().double() if "kv=" in policy else llama()  # a rounding in float32 may change a code
    rnn = RNN(model, policy, piece=1000)
    pipeline = PipelinedPrefill(rnn, chunk=6, lanes=3, laps=2)
    assert pipeline.before == max(p.capacity for p in rnn.plan.policies)
    for seed, length in ((1, 70), (2, 47), (3, 33), (4, 10), (5, 3)):  # each begins again in the memory of the last
        ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(seed))
        want, state = rnn.step(ids, rnn.start())
        reported = []
        logits, cache = pipeline.read(ids, reported.append)
        assert sum(reported) == length
        assert torch.allclose(logits, want, atol=1e-4)
        for ours, theirs in zip(cache.bounded, state.cache.bounded, strict=True):
            assert torch.equal(ours.slots.positions.sort().values, theirs.slots.positions.sort().values)
            assert torch.equal(ours.slots.seen, theirs.slots.seen)
            assert ours.slots.fed == theirs.slots.fed == length


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["fade", "tova-head,kv=int8", "blend"])
def test_kv_heads_with_budgets(llama, kind, together, monkeypatch):
    """Every head alone, as on a CPU and without kernels for a GPU, or all side by side, as on a GPU."""
    rnn = RNN(llama().double(), per_layer(kind, [[4, 9], [8, 5], [7, 7]]), piece=1000)
    want = [rnn.step(prompt(length), rnn.start()) for length in (70, 47, 10)]
    monkeypatch.setattr(head_groups, "_together", lambda _: together)
    pipeline = PipelinedPrefill(rnn, chunk=6, lanes=3, laps=2)
    for length, (logits, state) in zip((70, 47, 10), want, strict=True):
        ours, cache = pipeline.read(prompt(length))
        assert torch.allclose(ours, logits, atol=1e-6)
        for layer, other in zip(cache.bounded, state.cache.bounded, strict=True):
            for one, two in zip(layer.slots.heads, other.slots.heads, strict=True):
                assert torch.equal(one.positions.sort().values, two.positions.sort().values)
                assert torch.equal(one.seen, two.seen)
    assert [len(layer.spaces) for layer in pipeline._layers] == ([1] * 3 if together and kind != "blend" else [2] * 3)


def prompt(length):
    return torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("policy", ["tova:6", "tova-query-head:6", "h2o:20", "window:6", "tova:1"])
def test_a_model_with_a_sliding_window(policy):
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "sliding_window": 10}
    torch.manual_seed(0)
    rnn = RNN(MistralForCausalLM(MistralConfig(**shape, **heads)).eval(), policy)
    ids = torch.randint(0, 64, (1, 50), generator=torch.Generator().manual_seed(1))
    want, _ = rnn.step(ids, rnn.start())
    logits, _ = PipelinedPrefill(rnn, chunk=6, lanes=2, laps=2).read(ids)
    assert torch.allclose(logits, want, atol=1e-4)


@pytest.mark.slow
def test_a_compiled_pipeline_reads_the_same(llama, monkeypatch):
    whole, calls = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda *a, **more: calls.append(a) or whole(*a, backend="eager", **more))
    rnn = RNN(llama(num_hidden_layers=2), "tova:8", piece=1000)
    pipeline = PipelinedPrefill(rnn, chunk=6, lanes=2, laps=2, compile=True)
    ids = torch.randint(0, 64, (1, 47), generator=torch.Generator().manual_seed(1))
    want, _ = rnn.step(ids, rnn.start())
    assert torch.allclose(pipeline.read(ids)[0], want, atol=1e-4)
    assert len(calls) == 1


def test_refusals(llama):
    model = llama()
    with pytest.raises(ValueError, match="keeps every token"):
        PipelinedPrefill(RNN(model, "full"))
    with pytest.raises(ValueError, match="lanes is 0"):
        PipelinedPrefill(RNN(model, "tova:8"), lanes=0)
    with pytest.raises(ValueError, match="laps is 0"):
        PipelinedPrefill(RNN(model, "tova:8"), laps=0)


def test_rounds_have_few_sizes(llama):
    pipeline = PipelinedPrefill(RNN(llama(), "tova:8"), chunk=6, lanes=3, laps=4)
    assert pipeline.fits(26)
    assert not pipeline.fits(25)
    sizes = {chunks: pipeline._round_size(6 * chunks + 5) for chunks in (0, 1, 3, 4, 5, 6, 11, 12, 13, 100)}
    assert sizes == {0: 0, 1: 1, 3: 3, 4: 3, 5: 3, 6: 6, 11: 6, 12: 12, 13: 12, 100: 12}
