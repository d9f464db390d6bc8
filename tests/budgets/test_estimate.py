"""Losses by KV head from gradients: those of a model whose heads are moved by hand, and zero where they must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

import msrnn
from msrnn.budgets.estimate import head_losses
from msrnn.policy import Plan, fade

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, START = 48, 24
COUNTED = torch.arange(LENGTH - 1) >= START


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(0))


def test_the_shares_are_those_of_heads_moved_by_hand(llama: Any, ids: Tensor) -> None:
    model, size = llama(), 6
    losses = head_losses(model, ids, "fade", [size, 12], COUNTED)
    expected = by_hand(model, ids, size)
    assert [[head[0] for head in layer] for layer in losses] == [pytest.approx(layer, rel=1e-3) for layer in expected]
    assert len({share for layer in expected for share in layer}) == 6


def test_the_shares_add_up_to_what_the_bounded_model_loses(llama: Any, ids: Tensor) -> None:
    model = llama(initializer_range=0.05)  # changes are small there
    for size in (12, 20):
        full, bounded = (log_probabilities(model, ids, plan) for plan in (None, Plan((fade(size),) * 3)))
        loss = float(kl_div(bounded, full, reduction="sum", log_target=True)) / len(full)
        shares = torch.tensor(head_losses(model, ids, "fade", [size], COUNTED))
        assert float(shares.sum()) == pytest.approx(loss, rel=0.15)


@torch.no_grad()
def log_probabilities(model: Any, ids: Tensor, plan: Plan | None = None) -> Tensor:
    cache = None if plan is None else msrnn.cache(model, plan)
    logits: Tensor = model(ids[None], past_key_values=cache).logits[0, START:-1]
    return logits.log_softmax(-1)


def by_hand(model: Any, ids: Tensor, size: int) -> list[list[float]]:
    """Heads' outputs as the projections see them: the plain model, with what a bounded model's have added to them."""
    bounded, moves, inputs = [list[Tensor]() for _ in range(3)]
    projections = [layer.self_attn.o_proj for layer in model.model.layers]
    hooks = [one.register_forward_pre_hook(lambda _, args: bounded.append(args[0])) for one in projections]
    log_probabilities(model, ids, Plan((fade(size),) * 3))
    for hook in hooks:
        hook.remove()

    def move(_: Any, args: tuple[Tensor, ...]) -> Tensor:
        moves.append((bounded[len(moves)] - args[0]).detach())
        inputs.append(args[0] + moves[-1])
        return inputs[-1]

    full = log_probabilities(model, ids)
    hooks = [one.register_forward_pre_hook(move) for one in projections]
    moved = model(ids[None]).logits[0, START:-1].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(kl_div(moved, full, reduction="sum", log_target=True), inputs)
    products = [(g * move)[0].sum(0).view(2, -1).sum(1) for g, move in zip(gradients, moves, strict=True)]
    return [(product / (2 * len(full))).tolist() for product in products]


def test_a_head_that_nothing_reads_loses_nothing(llama: Any, ids: Tensor) -> None:
    model = llama()
    size = model.config.hidden_size // model.config.num_attention_heads
    share = model.config.num_attention_heads // model.config.num_key_value_heads
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, : size * share] = 0  # KV head 0
    losses = head_losses(model, ids, "fade", [4, 8], COUNTED)
    assert losses[1][0] == [0, 0]
    assert all(loss != 0 for layer in losses for head in layer for loss in head if head is not losses[1][0])


def test_fewer_slots_lose_more(llama: Any, ids: Tensor) -> None:
    model = llama(initializer_range=0.1)
    losses = torch.tensor(head_losses(model, ids, "h2o", [2, 8, 24], COUNTED)).sum((0, 1))
    assert losses[0] > losses[1] > losses[2] > 0


def test_only_counted_tokens_count(llama: Any, ids: Tensor) -> None:
    """What is counted together is what is counted apart, weighted by the number of tokens."""
    first, last = (torch.isin(torch.arange(LENGTH - 1), torch.tensor(columns)) for columns in ([30, 33], [40]))
    together, one, other = (
        torch.tensor(head_losses(llama(), ids, "fade", [8], c)) for c in (first | last, first, last)
    )
    assert torch.allclose(3 * together, 2 * one + other, atol=1e-6)
    assert not torch.allclose(one, other, rtol=0.1)


def test_a_window_of_the_model_is_part_of_full_attention(ids: Tensor) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, sliding_window=12)
    torch.manual_seed(0)
    losses = torch.tensor(head_losses(MistralForCausalLM(config).eval(), ids, "fade", [4, 12, 20], COUNTED))
    assert losses[..., 0].sum() > 0
    assert losses[..., 1:].abs().max() < 1e-4 * losses[..., 0].sum()  # no more than rounding


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_model_is_as_it_was(llama: Any, ids: Tensor, attention: str) -> None:
    model = llama(attention)
    before = model(ids[None]).logits
    head_losses(model, ids, "fade", [4], COUNTED)
    assert model.config._attn_implementation == attention
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert torch.equal(model(ids[None]).logits, before)
    assert not model.get_input_embeddings()._forward_hooks
