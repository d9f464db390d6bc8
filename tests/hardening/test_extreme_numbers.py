"""NaN, enormous and all-equal logits: the bound holds on every path, outputs are the plain model's, nothing hangs."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import msrnn
from msrnn.core.attention import Attention
from msrnn.core.recurrence import read
from msrnn.core.slots import Slots
from msrnn.policy import Policy
from tests.support.models import tiny_llama
from tests.support.oracle import slow_attention
from tests.support.plain_loop import Loop

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]
IDS = torch.randint(3, 64, (1, 48), generator=torch.Generator().manual_seed(0))
POLICIES = (
    "tova:6",
    "h2o:6",
    "tova-head+2:6",
    "window+2:6",
    "tova:6,gain=value_norm",
    "fade:8",
    "tova:1",
    "window:1",
    "blend:8",
)
SEED = 8


def scaled(factor: float) -> LlamaForCausalLM:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= factor
    return model


def with_nan(layer: int, where: str) -> LlamaForCausalLM:
    model = tiny_llama()
    getattr(model.model.layers[layer].self_attn, where).weight.data[3, 5] = float("nan")
    return model


MODELS = {
    "weights x 50": lambda: scaled(50),
    "weights x 5,000": lambda: scaled(5000),
    "all logits equal": lambda: scaled(0),
    "NaN in the queries of layer 0": lambda: with_nan(0, "q_proj"),
    "NaN in the keys of layer 1": lambda: with_nan(1, "k_proj"),
    "NaN in the values of layer 2": lambda: with_nan(2, "v_proj"),
    "an infinite weight": lambda: scaled(float("inf")),
}
PIECES = ([48], [20, 1, 1, 1, 25], [1] * 48)


@pytest.mark.parametrize("operations", ["compiled", "eager"])
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_a_model_of_extreme_numbers(kind: str, operations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSRNN_OPS", operations)
    model = MODELS[kind]()
    plain = model(IDS).logits
    for number, policy in enumerate(POLICIES):
        for prompt, pieces in product(("recurrent", "oneshot") if number < 2 else ("recurrent",), PIECES):
            cache = msrnn.cache(model, policy, prompt=prompt, chunk=9)
            parts = [model(part, past_key_values=cache).logits for part in IDS.split(pieces, 1)]
            most = cache.plan[0].capacity
            assert cache.held == most, (policy, prompt, pieces)
            assert all(bool((layer.slots.held == most).all()) for layer in cache.bounded), (policy, prompt, pieces)
            assert torch.equal(torch.cat(parts, 1).isnan(), plain.isnan()), (policy, prompt, pieces)
    room = msrnn.cache(model, "tova:64", chunk=9)
    parts = [model(part, past_key_values=room).logits for part in IDS.split([20, 1, 27], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), plain, equal_nan=True, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_the_engine_with_extreme_numbers(kind: str) -> None:
    """Its static rows: every request ends, with the tokens of the cache, and no layer holds more than the capacity."""
    model, texts = MODELS[kind](), [IDS[0, :30].tolist(), IDS[0, 20:27].tolist(), IDS[0].tolist()]
    for policy in ("tova:6", "h2o:6", "window+2:6", "tova:1"):
        engine = msrnn.Engine(model, policy, batch=2, length=80)
        written = engine.generate(texts, max_new_tokens=9)
        for text, new in zip(texts, written, strict=True):
            cache = msrnn.cache(model, policy)
            ids = torch.tensor([text])
            whole = model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
            assert new == whole[0, len(text) :].tolist(), policy
            assert cache.held == cache.plan[0].capacity
        assert engine.cache.held == cache.plan[0].capacity, policy


@pytest.mark.parametrize("factor", [50, 0])
@pytest.mark.parametrize("operations", ["compiled", "eager"])
@torch.no_grad()
def test_extreme_logits_against_the_definition(factor: float, operations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSRNN_OPS", operations)
    model = scaled(factor).double()
    for policy in ("tova:6", "h2o:6", "tova:1", "tova:6,gain=value_norm"):
        with slow_attention(model, policy):
            want = model(IDS, use_cache=False).logits
        for pieces in PIECES:
            cache = msrnn.cache(model, policy, chunk=9)
            parts = [model(part, past_key_values=cache).logits for part in IDS.split(pieces, 1)]
            torch.testing.assert_close(torch.cat(parts, 1), want)


def random_policy(dice: random.Random) -> Policy:
    capacity = dice.choice((1, 2, 3, 5, 8, 13, 24, 40))
    first = dice.randint(0, min(4, capacity))
    last = dice.choice((0, 0, dice.randint(0, capacity - first)))
    momentum = dice.choice((0.0, 0.0, 1.0, 0.5, 0.97, 1e-3))
    scope = dice.choice(("layer", "kv_head", "query_head"))
    return Policy(capacity, first, last, momentum, scope, gain=dice.choice((None, None, "value_norm")))


def tokens(seed: int, length: int, sharpness: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, n, length, 8, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    return query * sharpness, key, value


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_200_random_combinations_equal_a_plain_loop(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """30,000 tokens in all, in float64: policy, first, last, momentum, scope, gain, window, chunk, pieces."""
    total = 0
    for number in range(part * 50, part * 50 + 50):
        dice = random.Random(SEED * 1000 + number)
        policy, window = random_policy(dice), dice.choice((None, None, None, 7, 20, 100))
        length, chunk = (120, 180, 150)[number % 3], dice.choice((1, 2, 7, 16, 64, 128, 500))
        monkeypatch.setenv("MSRNN_OPS", dice.choice(("compiled", "compiled", "eager")))
        query, key, value = tokens(number, length, dice.choice((0.1, 1.0, 30.0)))
        attention = Attention(8**-0.5, softcap=dice.choice((None, None, 20.0)), window=window)
        loop = Loop(policy, heads=4, kv_heads=2)
        want = loop.run(query[0], key[0], value[0], attention)
        slots, outputs, start = Slots.empty(policy, key, value, 4, window), [], 0
        while start < length:
            size = dice.choice((1, 1, 3, chunk, length))
            piece = slice(start, min(start + size, length))
            given = (rows[:, :, piece] for rows in (query, key, value))
            outputs.append(read(slots, *given, policy, attention, chunk=chunk))
            start = piece.stop
        about = f"number {number}: {policy}, window {window}, chunk {chunk}, {length} tokens"
        held = [sorted(p for p in unit if p >= 0) for unit in slots.positions[0].tolist()]
        assert held == loop.held(), about
        torch.testing.assert_close(torch.cat(outputs, 2)[0], want, msg=lambda text, about=about: f"{about}: {text}")
        total += length
    assert total >= 7440
