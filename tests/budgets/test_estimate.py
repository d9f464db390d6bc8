"""Losses by KV head from gradients: as computed from models bounded in one layer, and zero where they must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import msrnn
from msrnn.budgets.estimate import head_losses
from msrnn.policy import Plan, fade, full

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, START = 48, 24


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(0))


def test_the_estimate_is_that_of_outputs_and_gradients_at_the_projection(llama: Any, ids: Tensor) -> None:
    model, size = llama(), 6
    losses = head_losses(model, ids, "fade", [size, 12], START)
    for layer in range(3):
        expected = by_hand(model, ids, layer, size)
        assert [head[0] for head in losses[layer]] == pytest.approx(expected, rel=1e-3)
        assert len(set(expected)) == len(expected) > 1


def by_hand(model: Any, ids: Tensor, layer: int, size: int) -> list[float]:
    """The heads' outputs as the output projection sees them, with the layer bounded and not, and the gradient there."""
    seen: list[Tensor] = []
    projection = model.model.layers[layer].self_attn.o_proj
    hook = projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = model(ids[None]).logits[0, START:-1]
    (gradient,) = torch.autograd.grad(cross_entropy(logits, ids[START + 1 :], reduction="sum"), seen[0])
    plan = Plan(tuple(fade(size) if i == layer else full() for i in range(3)))
    with torch.no_grad():
        model(ids[None], past_key_values=msrnn.cache(model, plan))
    hook.remove()
    kv_heads = model.config.num_key_value_heads
    products = (gradient * (seen[1] - seen[0])).detach()[0, START:].view(LENGTH - START, kv_heads, -1).sum(-1)
    return (products.double().square().sum(0) / (2 * (LENGTH - START))).tolist()


def test_a_head_that_nothing_reads_loses_nothing(llama: Any, ids: Tensor) -> None:
    model = llama()
    size = model.config.hidden_size // model.config.num_attention_heads
    share = model.config.num_attention_heads // model.config.num_key_value_heads
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, : size * share] = 0  # KV head 0
    losses = head_losses(model, ids, "fade", [4, 8], START)
    assert losses[1][0] == [0, 0]
    assert all(loss > 0 for layer in losses for head in layer for loss in head if head is not losses[1][0])


def test_fewer_slots_lose_more_and_all_of_them_nothing(llama: Any, ids: Tensor) -> None:
    losses = torch.tensor(head_losses(llama(), ids, "h2o", [2, 8, 24], START)).sum((0, 1))
    assert losses[0] > losses[1] > losses[2] > 0
    with pytest.raises(ValueError, match="a state of 25 slots is not full at token 24; use smaller sizes"):
        head_losses(llama(), ids, "fade", [8, 25], START)


def test_a_window_of_the_model_is_part_of_full_attention(ids: Tensor) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, sliding_window=12)
    torch.manual_seed(0)
    losses = torch.tensor(head_losses(MistralForCausalLM(config).eval(), ids, "fade", [4, 12, 20], START))
    assert (losses[..., 0] > 0).all()
    assert losses[..., 1:].max() < 1e-6 * losses[..., 0].min()  # no more than rounding


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_model_is_as_it_was(llama: Any, ids: Tensor, attention: str) -> None:
    model = llama(attention)
    before = model(ids[None]).logits
    head_losses(model, ids, "fade", [4], START)
    assert model.config._attn_implementation == attention
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert torch.equal(model(ids[None]).logits, before)
    assert not model.get_input_embeddings()._forward_hooks
