"""benchmarks/near_decisions.py: what it counts, on texts small enough to check."""

import importlib
from pathlib import Path

import pytest
import torch

import msrnn
from tests.support.models import tiny_llama


@pytest.fixture
def near_decisions(monkeypatch: pytest.MonkeyPatch):
    """With pieces of 128 tokens and chunks of 32."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module = importlib.import_module("near_decisions")
    monkeypatch.setattr(module, "PIECE", 128)
    monkeypatch.setattr(module, "CHUNK", 32)
    return module


def tokens(gap: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every token has less weight than those before it, by e to the power of the gap."""
    query, key = torch.zeros(2, 128, 4), torch.zeros(1, 128, 4)
    query[..., 0], key[..., 0] = 2.0, -gap * torch.arange(128)
    return query, key, torch.zeros(1, 128, 4)


@pytest.mark.parametrize("gap, near", [(0.5, 0.0), (0.0, 1.0)])
def test_near_decisions_are_those_between_equals(near_decisions, gap, near):
    """Every token after the first 16 makes one leave: the newest, far beyond doubt, or one of many equals."""
    layer = near_decisions.Layer(16, 2, 1, 4)
    assert layer.feed(tokens(gap), every=1) == {"from": 0, "to": 128, "near": near, "decisions": 128 - 16}


def test_one_chunk_in_so_many(near_decisions):
    layer = near_decisions.Layer(16, 2, 1, 4)
    assert layer.feed(tokens(0.5), every=2)["decisions"] == 32 - 16 + 32


@torch.no_grad()
def test_counting_changes_nothing(near_decisions):
    """The model reads on as it would; each layer asked for is counted once for every call."""
    model = tiny_llama()
    ids = torch.randint(0, model.config.vocab_size, (1, 256), generator=torch.Generator().manual_seed(0))
    counts: dict[int, dict] = {}
    plain, counted = (msrnn.cache(model, "tova:16", chunk=32) for _ in range(2))
    config = model.config
    sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    near_decisions._count_calls(counted.layers[1], near_decisions.Layer(16, *sizes), 1, 1, counts)
    for start in (0, 128):
        piece = ids[:, start : start + 128]
        expected, same = (model(piece, past_key_values=cache).logits for cache in (plain, counted))
        assert torch.equal(expected, same)
        assert counts.keys() == {1}
        assert (counts[1]["from"], counts[1]["to"]) == (start, start + 128)
        assert counts[1]["decisions"] == 128 - (16 if start == 0 else 0)
