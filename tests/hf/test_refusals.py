"""A bounded cache is used as it is meant or the call raises: no path runs unbounded, or on another text, in silence."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

import msrnn
from msrnn import BoundIgnored
from tests.support.oracle import slow_greedy

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = {"max_new_tokens": 8, "do_sample": False}
GEMMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "pad_token_id": 0,
    "eos_token_id": None,
}
IDS = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))


def force(model: LlamaForCausalLM, name: str) -> None:
    """Set the attention as a user would, or past transformers' own check where the machine lacks the kernel."""
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError):
        model.config._attn_implementation_internal = name
    assert "msrnn" not in model.config._attn_implementation


@pytest.mark.parametrize(
    "name", ["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "paged|sdpa", "paged|eager"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_any_attention_stays_the_models_own(llama, name: str, when: str) -> None:
    """Bounded calls run on the recurrence whatever was set, and leave it set; only the name is needed for that."""
    want = slow_greedy(llama().double(), "tova:6", IDS, 8)
    model = llama().double()
    if when == "before":
        force(model, name)
    cache = msrnn.cache(model, "tova:6")
    if when == "after":
        force(model, name)
    assert model.generate(IDS, past_key_values=cache, **GREEDY).tolist() == want.tolist()
    assert cache.held == 6
    assert model.config._attn_implementation == name


def test_the_name_is_back_after_an_error(llama) -> None:
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    with pytest.raises(IndexError):
        model(IDS + 1000, past_key_values=cache)
    with pytest.raises(BoundIgnored):
        model(IDS, past_key_values=cache, attention_mask=torch.ones(1, 1, 12, 12))
    assert model.config._attn_implementation == "sdpa"


def test_a_forward_past_the_hooks(llama) -> None:
    """`model.model.forward` skips PyTorch's hooks: refused, not run unbounded. One level up it still is bounded."""
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    with pytest.raises(
        BoundIgnored, match="does not run in this call, so the bound would be ignored: call the model itself"
    ):
        model.model.forward(IDS, past_key_values=cache, use_cache=True)
    cache.reset()
    model.forward(IDS, past_key_values=cache)
    assert cache.held == 6


def test_another_model_with_the_same_cache(llama) -> None:
    cache, other = msrnn.cache(llama(), "tova:6"), llama(num_hidden_layers=2)
    with pytest.raises(BoundIgnored, match="made for it"):
        other(IDS, past_key_values=cache)
    msrnn.cache(other, "tova:6")
    with pytest.raises(BoundIgnored, match="made for another model"):
        other(IDS, past_key_values=cache)


def test_a_copied_model_has_a_switch_of_its_own(llama) -> None:
    model = llama()
    msrnn.cache(model, "tova:6")
    twin = copy.deepcopy(model)
    cache = msrnn.cache(twin, "tova:6")
    twin(IDS, past_key_values=cache)
    assert cache.held == 6
    assert (model.config._attn_implementation, twin.config._attn_implementation) == ("sdpa", "sdpa")


class Inline(LlamaAttention):
    """Attention as models used to write it: the cache's keys multiplied on the spot."""

    steps: str = "matmul"

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = past_key_values.update(key, value, self.layer_idx)
        assert key.shape[-1] == value.size(-1) == self.head_dim
        if self.steps == "sdpa":
            out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        elif self.steps == "index":
            out = query @ key[:, :, :, None].mT @ value
        elif self.steps == "times":
            out = (key * query).softmax(-1) @ value
        elif self.steps == "cat":
            out = query @ torch.cat([key, key], 1).mT @ torch.cat([value, value], 1)
        else:
            out = (query @ key.repeat_interleave(2, 1).mT).softmax(-1) @ value.repeat_interleave(2, 1)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize("steps", ["matmul", "sdpa", "index", "times", "cat"])
def test_attention_written_inline(llama, steps: str) -> None:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.__class__, layer.self_attn.steps = Inline, steps
    cache = msrnn.cache(model, "tova:6")
    with pytest.raises(BoundIgnored, match="opened a bounded cache"):
        model(IDS, past_key_values=cache)


def test_attention_that_forgets_its_cache(llama) -> None:
    """The mask was made for the bounded cache, but the keys did not come from it."""
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    forget = model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, given: (args, given | {"past_key_values": None}), with_kwargs=True
    )
    with pytest.raises(BoundIgnored, match="dropped the bounded cache"):
        model(IDS, past_key_values=cache)
    forget.remove()
    cache.reset()
    model(IDS, past_key_values=cache)
    assert cache.held == 6


def test_gradient_checkpointing(llama) -> None:
    """transformers drops the cache there, with a warning that is easily missed."""
    model = llama().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(BoundIgnored, match="dropped the bounded cache"):
        model(IDS, past_key_values=msrnn.cache(model, "tova:6"))


def test_dropout(llama) -> None:
    model = llama(attention_dropout=0.1).train()
    with pytest.raises(BoundIgnored, match=r"model\.eval\(\)"):
        model(IDS, past_key_values=msrnn.cache(model, "tova:6"))


def test_no_gradient(llama) -> None:
    """A gradient that left the attention out would be wrong without a word."""
    model = llama()
    logits = model(IDS, past_key_values=msrnn.cache(model, "tova:6")).logits
    with pytest.raises(BoundIgnored, match="no gradient"):
        logits.sum().backward()


def test_no_rollback(llama) -> None:
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    model(IDS, past_key_values=cache)
    for tokens in (1, -1, 5):
        with pytest.raises(BoundIgnored, match="rolled back"):
            cache.crop(tokens)
    cache.crop(0)
    assert not cache.is_croppable
    assert (cache.held, cache.get_seq_length()) == (6, 12)


@pytest.mark.parametrize("helper", ["assistant_model", "prompt_lookup_num_tokens"])
def test_assisted_decoding(llama, helper: str) -> None:
    model = llama()
    options = {helper: llama(num_hidden_layers=1) if helper == "assistant_model" else 3}
    assert model.generate(IDS, **GREEDY, **options).shape == (1, 20), "it works without our cache"
    with pytest.raises(BoundIgnored, match="assisted decoding"):
        model.generate(IDS, past_key_values=msrnn.cache(model, "tova:6"), **GREEDY, **options)


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 12, 12).tril().bool(), torch.zeros(1, 1, 12, 12)])
def test_ready_made_masks(llama, mask: Tensor) -> None:
    model = llama()
    with pytest.raises(BoundIgnored, match="2-D attention mask"):
        model(IDS, attention_mask=mask, past_key_values=msrnn.cache(model, "tova:6"))


def test_ready_made_masks_by_kind_of_layer() -> None:
    model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**GEMMA)).eval()
    masks = dict.fromkeys(("full_attention", "sliding_attention"), torch.ones(1, 1, 12, 12).tril().bool())
    model(IDS, attention_mask=masks)
    with pytest.raises(BoundIgnored, match="2-D attention mask"):
        model(IDS, attention_mask=masks, past_key_values=msrnn.cache(model, "tova:6"))


def test_masks_that_are_not_causal(llama) -> None:
    model = llama()
    model.config.is_causal = False  # transformers' own switch to a mask that looks both ways
    with pytest.raises(BoundIgnored, match="causal text only"):
        model(IDS, past_key_values=msrnn.cache(model, "tova:6"))


def test_images_that_see_ahead() -> None:
    """Gemma 3 reads text as ever; its image tokens look both ways, which a recurrence cannot."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    config = hf.Gemma3Config(text_config=GEMMA, vision_config=vision, mm_tokens_per_image=4)
    model = hf.Gemma3ForConditionalGeneration(config).eval()
    cache = msrnn.cache(model, "tova:6")
    model.generate(IDS, past_key_values=cache, **GREEDY)
    assert (cache.held, cache.get_seq_length()) == (6, 19)
    kinds = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]])
    with pytest.raises(BoundIgnored, match="causal text only"):
        model(IDS, token_type_ids=kinds, past_key_values=msrnn.cache(model, "tova:6"))


def test_a_mask_of_only_the_new_tokens(llama) -> None:
    """It cannot be told from a text that is fed again from its beginning."""
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    model(IDS, past_key_values=cache)
    with pytest.raises(BoundIgnored, match="fed twice"):
        model(IDS, attention_mask=torch.ones(1, 12), past_key_values=cache)


def test_positions_that_begin_again(llama) -> None:
    """The same, where there is no mask to tell."""
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    model(IDS, past_key_values=cache)
    with pytest.raises(BoundIgnored, match="fed twice"):
        model(IDS, position_ids=torch.arange(12)[None], past_key_values=cache)


@torch.no_grad()
def test_positions_that_begin_late(llama) -> None:
    """A row whose first columns were all padding begins at 0 when others are far on, and that is right."""
    model = llama().double()
    cache, ids = msrnn.cache(model, "tova:6"), IDS.repeat(2, 1)
    mask = torch.tensor([[1] * 12, [0] * 6 + [1] * 6])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = [{"attention_mask": mask[:, :end], "position_ids": positions[:, end - 6 : end]} for end in (6, 12)]
    logits = [model(p, past_key_values=cache, **g).logits for p, g in zip(ids.split(6, 1), given, strict=True)]
    alone = model(IDS[:, 6:], past_key_values=msrnn.cache(model, "tova:6")).logits
    torch.testing.assert_close(logits[1][1], alone[0])


def test_generate_without_use_cache(llama) -> None:
    """It feeds the whole text again at every step."""
    model = llama()
    with pytest.raises(BoundIgnored, match="fed twice"):
        model.generate(IDS, past_key_values=msrnn.cache(model, "tova:6"), use_cache=False, **GREEDY)


@torch.no_grad()
def test_forward_without_use_cache(llama) -> None:
    """The flag asks for no new cache; the one that is given is used all the same."""
    model = llama()
    one, two = msrnn.cache(model, "tova:6"), msrnn.cache(model, "tova:6")
    logits = model(IDS, past_key_values=one, use_cache=False).logits
    assert torch.equal(logits, model(IDS, past_key_values=two).logits)
    assert not torch.allclose(logits, model(IDS).logits)
    assert one.held == 6


def test_a_turn_that_starts_again(llama) -> None:
    """A second turn takes the whole text. A chunked prefill would begin at its first token once more."""
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    text = model.generate(IDS, past_key_values=cache, **GREEDY)
    with pytest.raises(BoundIgnored, match="fed twice"):
        model.generate(torch.cat([text, IDS], 1), past_key_values=cache, prefill_chunk_size=4, **GREEDY)
    cache = msrnn.cache(model, "tova:6")
    model.generate(IDS, past_key_values=cache, **GREEDY)  # 19 columns
    with pytest.raises(BoundIgnored, match="fed twice"):
        model.generate(text[:, :19], past_key_values=cache, **GREEDY)


@pytest.mark.parametrize("rows", [2, 3])
def test_another_number_of_sequences(llama, rows: int) -> None:
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    model(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=f"holds 1 sequences, {rows} were given"):
        model(IDS.repeat(rows, 1), past_key_values=cache)
    with pytest.raises((ValueError, BoundIgnored)):
        model.generate(IDS.repeat(1, 2), past_key_values=cache, num_beams=rows, **GREEDY)


@pytest.mark.parametrize("kind", ["static", "dynamic", "offloaded", "quantized", "paged"])
def test_two_caches_at_once(llama, kind: str) -> None:
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    with pytest.raises(ValueError, match=r"cache_implementation|paged"):
        model.generate(IDS, past_key_values=cache, cache_implementation=kind, **GREEDY)
    config = hf.GenerationConfig(cache_implementation=kind, **GREEDY)
    with pytest.raises(ValueError, match=r"cache_implementation|paged"):
        model.generate(IDS, past_key_values=cache, generation_config=config)
    assert cache.get_seq_length() == 0


def test_offloading(llama) -> None:
    model = llama()
    cache = msrnn.cache(model, "tova:6")
    for call in (cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(BoundIgnored, match="not offloaded"):
            call()


@pytest.mark.parametrize("name", ["position_bias", "attention_bias", "alibi", "head_mask"])
def test_what_attention_is_given_besides(llama, name: str) -> None:
    model = llama()
    with pytest.raises(BoundIgnored, match=name):
        model(IDS, past_key_values=msrnn.cache(model, "tova:6"), **{name: torch.ones(1)})


@pytest.mark.slow
def test_compiled(llama) -> None:
    """A compiled model leaves its graph for the recurrence and comes back: the same bounded result."""
    model, cached = llama(num_hidden_layers=1), []
    for forward in (model, torch.compile(model, backend="eager")):
        torch._dynamo.reset()
        cache = msrnn.cache(model, "tova:6")
        with torch.no_grad():
            logits = [forward(part, past_key_values=cache).logits for part in IDS.split(1, 1)]
        assert (cache.held, cache.get_seq_length()) == (6, 12)
        cached.append(torch.cat(logits, 1))
    torch.testing.assert_close(*cached, rtol=0, atol=1e-4)


def test_plain_compiled_whole(llama) -> None:
    """After the switch a static cache still compiles without a break."""
    model = llama()
    plain = model.generate(IDS, **GREEDY)
    msrnn.cache(model, "tova:6")
    options = hf.CompileConfig(backend="eager", mode=None, fullgraph=True)
    options._compile_all_devices = True
    torch._dynamo.reset()
    got = model.generate(IDS, cache_implementation="static", compile_config=options, **GREEDY)
    assert got.tolist() == plain.tolist()


def test_a_class_without_the_interface(llama, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation_cached_value", False, raising=False)
    with pytest.raises(msrnn.Unsupported, match=r"llama does not use transformers' AttentionInterface"):
        msrnn.cache(model, "tova:6")


def test_heads_spread_over_processes(llama) -> None:
    """Each process would see the weights of its own heads only, and evict other tokens than the rest."""
    model = llama()
    model._tp_size = 2
    with pytest.raises(msrnn.Unsupported, match="2 processes"):
        msrnn.cache(model, "tova:6")
    for policy in ("tova-head:6", "h2o:6", "window:6", "full"):
        msrnn.cache(model, policy)


def test_wrong_arguments(llama) -> None:
    model = llama()
    with pytest.raises(ValueError, match="plan has 2 layers, the model 3"):
        msrnn.cache(model, ["tova:6", "tova:6"])
    with pytest.raises(ValueError, match="chunk is 0"):
        msrnn.cache(model, "tova:6", chunk=0)
    with pytest.raises(ValueError, match="capacity is 0"):
        msrnn.cache(model, "tova:0")
