"""What a refused or interrupted call leaves behind: the cache as it was, or one that says it cannot go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import LlamaForCausalLM

import msrnn
from msrnn import BoundIgnored

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits_after(model: LlamaForCausalLM, *texts: Tensor, policy: str = "tova:6") -> Tensor:
    """Those of the last of the texts that a new cache reads."""
    cache = msrnn.cache(model, policy)
    return [model(text, past_key_values=cache).logits for text in texts][-1]


BAD_CALLS = {
    "2 sequences": ({"input_ids": IDS[:, :3].repeat(2, 1)}, ValueError, "holds 1 sequences, 2 were given"),
    "a mask of 2 rows": ({"attention_mask": torch.ones(2, 15)}, BoundIgnored, "mask has 2 rows for 1 sequences"),
    "a short mask": ({"attention_mask": torch.ones(1, 3)}, BoundIgnored, "mask has 3 columns"),
    "the first positions": ({"position_ids": torch.arange(3)[None]}, BoundIgnored, "begin again at 0"),
    "a bias": ({"alibi": torch.ones(1)}, BoundIgnored, "alibi"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
@torch.no_grad()
def test_a_refused_call_leaves_the_cache_as_it_was(llama, case: str) -> None:
    model, (arguments, error, reason) = llama(), BAD_CALLS[case]
    cache = msrnn.cache(model, "tova:6")
    model(IDS, past_key_values=cache)
    for _ in range(2):
        with pytest.raises(error, match=reason):
            model(past_key_values=cache, **{"input_ids": IDS[:, :3], **arguments})
    logits = model(IDS[:, :3], past_key_values=cache).logits
    assert torch.equal(logits, logits_after(model, IDS, IDS[:, :3]))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    "policy, held, given",
    [
        *((policy, torch.float32, torch.float64) for policy in ("tova:6", "fade:6,kv=int8", "blend:6,kv=k8v4")),
        *((policy, torch.bfloat16, torch.float32) for policy in ("tova:6", "h2o:6", "fade:6", "blend:6")),
        ("tova:6,gain=value_norm", torch.bfloat16, torch.float16),
    ],
)
@torch.no_grad()
def test_a_refused_dtype_leaves_the_cache_as_it_was(llama, policy, held, given, tokens) -> None:
    """Codes would fit any dtype, the scores beside them do not; scores would fit, 16-bit slots do not."""
    model = llama().to(held)
    cache = msrnn.cache(model, policy)
    model(IDS, past_key_values=cache)
    model.to(given)
    with pytest.raises(ValueError, match=rf"holds {held}, {given} was given"):
        model(IDS[:, :tokens], past_key_values=cache)
    model.to(held)
    logits = model(IDS[:, :3], past_key_values=cache).logits
    assert torch.equal(logits, logits_after(model, IDS, IDS[:, :3], policy=policy))


@torch.no_grad()
def test_a_call_that_a_later_layer_refuses(llama) -> None:
    """The layers before it have read the tokens, so the cache cannot go on."""
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    hook = model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, given: (args, given | {"alibi": torch.ones(1)}), with_kwargs=True
    )
    with pytest.raises(BoundIgnored, match="alibi"):
        model(IDS, past_key_values=cache)
    hook.remove()
    with pytest.raises(BoundIgnored, match=r"cut off.*reset\(\)"):
        model(IDS, past_key_values=cache)


def test_layers_of_another_kind_come_first() -> None:
    """A convolution has read the tokens when the first attention refuses them: the cache does not go on either."""
    config = hf.Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        pad_token_id=0,
        eos_token_id=None,
    )
    model = hf.Lfm2ForCausalLM(config).eval()
    cache = msrnn.cache(model, "tova:6")
    model(IDS, past_key_values=cache)
    with pytest.raises(BoundIgnored, match="alibi"):
        model(IDS, past_key_values=cache, alibi=torch.ones(1))
    with pytest.raises(BoundIgnored, match=r"cut off.*reset\(\)"):
        model(IDS, past_key_values=cache)


def test_a_used_cache_and_another_text(llama) -> None:
    """Of a shorter text `generate` leaves no token; one as long comes whole, with a mask that does not fit."""
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    model(IDS, past_key_values=cache)
    for text, message in (IDS[:, :5], "has read 12 tokens, so none of the given ones is new"), (IDS, "fed twice"):
        with pytest.raises(BoundIgnored, match=message):
            model.generate(text, past_key_values=cache, max_new_tokens=3)
    assert torch.equal(model(IDS[:, :3], past_key_values=cache).logits, logits_after(model, IDS, IDS[:, :3]))


@pytest.mark.parametrize("columns", [1, 11, 13, 24, 25])
def test_masks_of_another_length(llama, columns: int) -> None:
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    with pytest.raises(BoundIgnored, match=rf"mask has {columns} columns; 0 were read before and 12 are new"):
        model(IDS, attention_mask=torch.ones(1, columns), past_key_values=cache)
    assert torch.equal(model(IDS, past_key_values=cache).logits, logits_after(model, IDS)), "as if it had not been"
    cache.reset()
    model(IDS, attention_mask=torch.ones(1, 12), past_key_values=cache)
    assert cache.held == 6


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_call_that_was_cut_off(llama, layer: int) -> None:
    """Ctrl-C between two layers leaves states of different lengths; the next call must not go on from there."""
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    model(IDS, past_key_values=cache)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[layer].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(IDS, past_key_values=cache)
    hook.remove()
    if layer == 2:  # the last: nothing is missing
        model(IDS, past_key_values=cache)
        assert cache.get_seq_length() == 36
        return
    with pytest.raises(BoundIgnored, match=r"cut off between layers; reset\(\)"):
        model(IDS, past_key_values=cache)
