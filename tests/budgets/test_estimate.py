"""Losses by KV head from gradients: those of a model whose heads are moved by hand, and zero where they must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, nll_loss

import msrnn
from msrnn.budgets.estimate import combine, every_second, head_losses, losses_alone, losses_together
from msrnn.plan import Plan
from msrnn.policy import fade, full

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, START = 48, 24
COUNTED = torch.arange(LENGTH - 1) >= START
Move = Callable[[Any, tuple[Tensor, ...]], Any]


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(0))


def log_probabilities(model: Any, ids: Tensor, plan: Plan | None = None, hook: Move | None = None) -> Tensor:
    """From START on; `hook` sees what goes into the output projection of every layer."""
    projections = [layer.self_attn.o_proj for layer in model.model.layers]
    hooks = [one.register_forward_pre_hook(hook) for one in projections if hook is not None]
    with torch.set_grad_enabled(plan is None):
        logits: Tensor = model(ids[None], past_key_values=plan and msrnn.cache(model, plan)).logits[0, START:-1]
    for one in hooks:
        one.remove()
    return logits.log_softmax(-1)


def test_alone_is_the_second_order_of_one_bounded_layer(llama: Any, ids: Tensor) -> None:
    model = llama()
    losses, target = losses_alone(model, ids, [fade(6), fade(12)], COUNTED)
    inputs = list[Tensor]()
    output = log_probabilities(model, ids, hook=lambda _, args: inputs.append(args[0]))
    assert torch.allclose(target, output, atol=1e-5)
    gradients = torch.autograd.grad(nll_loss(output, ids[START + 1 :], reduction="sum"), inputs)
    for layer in range(3):
        bounded = list[Tensor]()
        plan = Plan(tuple(fade(12) if i == layer else full() for i in range(3)))
        log_probabilities(model, ids, plan, lambda _, args, bounded=bounded: bounded.append(args[0]))
        products = gradients[layer] * (bounded[layer] - inputs[layer])
        by_head = products.detach()[0, START:].view(LENGTH - START, 2, -1).sum(-1)
        expected = by_head.square().sum(0) / (2 * (LENGTH - 1 - START))
        assert losses[layer][:, 1].tolist() == pytest.approx(expected.tolist(), rel=1e-3)


def test_together_is_the_slope_of_heads_moved_by_hand(llama: Any, ids: Tensor) -> None:
    model, bounded, moves, inputs = llama(), list[Tensor](), list[Tensor](), list[Tensor]()
    target = log_probabilities(model, ids).detach()
    losses = losses_together(model, ids, [fade(6)], COUNTED, target)
    log_probabilities(model, ids, Plan((fade(6),) * 3), lambda _, args: bounded.append(args[0]))

    def move(_: Any, args: tuple[Tensor, ...]) -> Tensor:
        moves.append((bounded[len(moves)] - args[0]).detach())
        inputs.append(args[0] + moves[-1])
        return inputs[-1]

    moved = log_probabilities(model, ids, hook=move)
    gradients = torch.autograd.grad(kl_div(moved, target, reduction="sum", log_target=True), inputs)
    for layer, gradient, change in zip(losses, gradients, moves, strict=True):
        expected = (gradient * change)[0].sum(0).view(2, -1).sum(1) / (2 * len(target))
        assert layer[:, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-3)


def test_shares_add_up_to_what_the_bounded_model_loses(llama: Any, ids: Tensor) -> None:
    model = llama(initializer_range=0.05)  # changes are small there
    target = log_probabilities(model, ids).detach()
    for size in (12, 20):
        bounded = log_probabilities(model, ids, Plan((fade(size),) * 3))
        loss = float(kl_div(bounded, target, reduction="sum", log_target=True)) / len(target)
        shares = losses_together(model, ids, [fade(size)], COUNTED, target)
        assert float(torch.stack(shares).sum()) == pytest.approx(loss, rel=0.15)


def test_sizes_of_the_two_estimates(llama: Any, ids: Tensor) -> None:
    assert every_second([16, 32, 64, 128]) == [32, 128]
    assert every_second([16, 32, 64]) == [16, 64]
    alone, together = head_losses(llama(), ids, "fade", [4, 8, 16], COUNTED)
    assert {tuple(layer.shape) for layer in alone} == {(2, 3)}
    assert {tuple(layer.shape) for layer in together} == {(2, 2)}
    target = log_probabilities(llama(), ids).detach()
    shares = losses_together(llama(), ids, [fade(4), fade(16)], COUNTED, target)
    assert torch.allclose(torch.stack(together), torch.stack(shares), atol=1e-6)


def test_a_curve_is_the_mean_of_both_estimates() -> None:
    result = combine([0.8, 0.4, 0.2, 0.1], [0.4, 0.4], [16, 32, 64, 128])
    assert result == pytest.approx([0.8, 0.4, 0.2 * (1 + 2) / 2, 0.25])  # ratios 1, 1, 2 (between 1 and 4), 4
    assert combine([0.4, 0.2], [-1.0], [16, 32]) == pytest.approx([0.2, 0.1], rel=2e-3)  # no share below 0
    assert combine([0.0, 0.0], [0.0], [16, 32]) == [0, 0]


def test_a_head_that_nothing_reads_loses_nothing(llama: Any, ids: Tensor) -> None:
    model = llama()
    size = model.config.hidden_size // model.config.num_attention_heads
    share = model.config.num_attention_heads // model.config.num_key_value_heads
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, : size * share] = 0  # KV head 0
    alone, together = head_losses(model, ids, "fade", [4, 8], COUNTED)
    assert (alone[1][0].tolist(), together[1][0].tolist()) == ([0, 0], [0])
    assert all((losses > 0).all() for losses in (alone[0], alone[1][1], alone[2]))


def test_fewer_slots_lose_more(llama: Any, ids: Tensor) -> None:
    alone, together = head_losses(llama(initializer_range=0.1), ids, "h2o", [2, 8, 24], COUNTED)
    for estimate in (alone, together):
        losses = torch.stack(estimate).sum((0, 1)).tolist()
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] > 0


def test_only_counted_tokens_count(llama: Any, ids: Tensor) -> None:
    """Shares of what is counted together are those of what is counted apart, weighted by the number of tokens."""
    model, both = llama(), log_probabilities(llama(), ids).detach()

    def shares(*columns: int) -> Tensor:
        counted = torch.isin(torch.arange(LENGTH - 1), torch.tensor(columns))
        return torch.stack(losses_together(model, ids, [fade(8)], counted, both[counted[START:]]))

    assert torch.allclose(3 * shares(30, 33, 40), 2 * shares(30, 33) + shares(40), atol=1e-6)
    assert not torch.allclose(shares(30, 33), shares(40), rtol=0.1)


def test_a_window_of_the_model_is_part_of_full_attention(ids: Tensor) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, sliding_window=12)
    torch.manual_seed(0)
    for estimate in head_losses(MistralForCausalLM(config).eval(), ids, "fade", [4, 12, 20], COUNTED):
        losses = torch.stack(estimate)
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
