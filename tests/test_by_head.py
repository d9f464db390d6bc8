"""A whole model whose KV heads have budgets of their own: the cache, the RNN, saved states, traces and the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import msrnn
from msrnn.core.heads import HeadSlots, parts_of
from msrnn.engine.engine import Engine
from msrnn.engine.pipeline import PipelinedPrefill
from msrnn.hf.cost import cost
from msrnn.hf.geometry import geometry
from msrnn.plan import Plan, per_layer
from msrnn.state_file import StateError
from tests.support.models import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
CAPACITIES = [[5, 14], [9, 4], [20, 7]]
KINDS = ("fade", "h2o,kv=int8", "tova-head,gain=value_norm", "fade,kv=k8v4")


def plan(kind: str = "fade", capacities: list[list[int]] = CAPACITIES) -> Plan:
    return per_layer(kind, capacities)


def ids(length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def generate(model, policy, prompt: torch.Tensor, new: int) -> list[int]:
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new, "do_sample": False}
    return model.generate(prompt, past_key_values=msrnn.cache(model, policy), **settings)[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_budgets_are_the_plain_policy(kind: str) -> None:
    model, name, *changes = tiny_llama().double(), *kind.split(",")
    plain = msrnn.RNN(model, ",".join([f"{name}:9", *changes]))
    heads = msrnn.RNN(model, plan(kind, [[9, 9]] * 3))
    (want, before), (logits, state) = (rnn.read(ids(70)[0], rnn.start(trace=True)) for rnn in (plain, heads))
    torch.testing.assert_close(logits, want)
    assert all(map(torch.equal, state.trace.deaths, before.trace.deaths))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_size_agree(kind: str) -> None:
    rnn = msrnn.RNN(tiny_llama().double(), plan(kind))
    want, whole = rnn.read(ids(60)[0], rnn.start(trace=True))
    state = rnn.start(trace=True)
    for piece in torch.split(ids(60), [1, 1, 20, 3, 1, 34], 1):
        logits, state = rnn.step(piece, state)
    torch.testing.assert_close(logits, want)
    assert all(map(torch.equal, state.trace.deaths, whole.trace.deaths))
    held = [part.held.max().item() for layer in state.layers for part in parts_of(layer)]
    assert held == [size for layer in CAPACITIES for size in layer]


def test_every_head_holds_what_its_trace_says() -> None:
    rnn = msrnn.RNN(tiny_llama(), plan())
    _, state = rnn.read(ids(50)[0], rnn.start(trace=True))
    assert [deaths.shape[1] for deaths in state.trace.deaths] == [2, 2, 2]
    for number, layer in enumerate(state.layers):
        alive = state.trace.held(number, 49)[0]
        for head, part in enumerate(parts_of(layer)):
            positions = part.positions[0, 0]
            assert sorted(positions[positions >= 0].tolist()) == alive[head].nonzero()[:, 0].tolist()


def test_ragged_rows_and_beams() -> None:
    rnn, long, short = msrnn.RNN(tiny_llama(), plan()), ids(40), ids(25, seed=1)
    padded = torch.cat([long, torch.nn.functional.pad(short, (15, 0))])
    mask = torch.ones_like(padded)
    mask[1, :15] = 0
    logits, state = rnn.step(padded, rnn.start(), mask)
    for row, alone in enumerate((long, short)):
        torch.testing.assert_close(logits[row], rnn.step(alone, rnn.start())[0][0])
    state.cache.reorder_cache(torch.tensor([1, 1]))
    logits, _ = rnn.step(torch.tensor([[5], [5]]), state)
    torch.testing.assert_close(logits[0], logits[1])


@pytest.mark.parametrize("kind", ["fade", "fade,kv=int8"])
def test_a_state_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    rnn, path = msrnn.RNN(tiny_llama(), plan(kind)), tmp_path / "state"
    _, state = rnn.read(ids(50)[0], rnn.start())
    state.save(path)
    twin = state.fork()
    loaded = rnn.load(path)
    assert all(isinstance(layer, HeadSlots) for layer in loaded.layers)
    (want, _), (logits, _) = (rnn.step(ids(9, seed=2), one) for one in (twin, loaded))
    assert torch.equal(logits, want)
    with pytest.raises(StateError, match="was made for another policy"):
        msrnn.RNN(rnn.model, plan(kind, [[5, 14], [9, 4], [20, 8]])).load(path)
    with pytest.raises(StateError, match="was made for another policy"):
        msrnn.RNN(rnn.model, "fade:9").load(path)


def test_it_costs_what_was_predicted() -> None:
    model = tiny_llama()
    rnn = msrnn.RNN(model, plan("fade,kv=int8"))
    _, state = rnn.read(ids(50)[0], rnn.start())
    assert state.nbytes == cost(geometry(model), rnn.plan, model.dtype, 50).state


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_writes_the_same(kind: str) -> None:
    model, policy = tiny_llama().double(), plan(kind)
    prompts = [ids(size, seed=size)[0].tolist() for size in (30, 3, 17, 1, 9)]
    engine = Engine(model, policy, batch=2, length=64)
    want = [generate(model, policy, torch.tensor([prompt]), 8) for prompt in prompts]
    assert engine.generate(prompts, max_new_tokens=8) == want


def test_a_pipelined_prompt_is_read_the_same() -> None:
    rnn = msrnn.RNN(tiny_llama(), plan(), piece=1000)
    pipeline = PipelinedPrefill(rnn, chunk=6, lanes=3, laps=2)
    for length in (75, 48):  # the second begins again in the memory of the first
        want, state = rnn.step(ids(length), rnn.start())
        logits, bounded = pipeline.read(ids(length))
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(bounded.bounded, state.cache.bounded, strict=True):
            for one, other in zip(parts_of(ours.slots), parts_of(theirs.slots), strict=True):
                assert torch.equal(one.positions.sort().values, other.positions.sort().values)
                assert (one.seen.tolist(), one.fed) == (other.seen.tolist(), other.fed) == ([length], length)


def test_layers_with_a_window_of_their_own() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "sliding_window": 10}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**shape, **heads)).eval()
    rnn = msrnn.RNN(model, plan(capacities=[[4, 30], [9, 6]]))
    want, state = rnn.read(ids(40)[0], rnn.start())
    logits = None
    stepped = rnn.start()
    for token in ids(40)[0]:
        logits, stepped = rnn.step(token.view(1, 1), stepped)
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
    assert state.nbytes == cost(geometry(model), rnn.plan, model.dtype, 40).state


def test_a_plan_for_other_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="budgets are for 3 KV heads in a layer that has 2"):
        msrnn.cache(tiny_llama(), plan(capacities=[[5, 6, 7]] * 3))
