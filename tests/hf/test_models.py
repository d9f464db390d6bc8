"""Every family of models: bounded it equals the definition, with room for everything it equals the plain model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

import msrnn
from msrnn.hf.cache import geometry
from tests.support.oracle import positions_held, slow_attention, survivors

pytestmark = pytest.mark.usefixtures("one_thread")
POLICIES = ("tova:6", "window+2:6", "h2o:6", "tova-head:6")
MORE = ("tova-query-head:6,last=1", "h2o-layer+1:7", "window:5", "tova:6,momentum=0.5")
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": False}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "yi": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "rope_theta": 5e6, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, **EXPERTS}),
    "gemma2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("Gemma3", GEMMA | {"layer_types": SLIDING, "query_pre_attn_scalar": 8}),
    "gemma4": (
        "Gemma4",
        {
            **GEMMA,
            "global_head_dim": 16,
            "layer_types": [*SLIDING[:2], "full_attention"],  # the last must be full
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "phi3": ("Phi3", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.7}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "sliding_window": 8, "layer_types": SLIDING, **EXPERTS}),
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "shared_expert_intermediate_size": 16,
            **EXPERTS,
            **LINEAR,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "full_attention"], "block_multiple_of": 16}),
    "bamba": ("Bamba", {"attn_layer_indices": [1], **MAMBA}),
}
ONLY_EAGER = ("gpt_oss",)


def build(name: str, attn: str = "eager", **changes: Any) -> PreTrainedModel:
    family, shape = (FAMILIES | HYBRIDS)[name]
    make = getattr(hf, f"{family}TextConfig", None) or getattr(hf, f"{family}Config")
    allowed = BASE if name != "gpt_neox" else {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
    config = make(**(allowed | shape | changes))
    config._attn_implementation = attn
    config._experts_implementation = "eager"  # the others know no float64
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForCausalLM")(config).eval()
    for module in model.modules():  # sinks as large as the logits, so that they matter
        if hasattr(module, "sinks"):
            torch.nn.init.normal_(module.sinks, std=2.0)
    model.generation_config.eos_token_id = None
    return model


def some_ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(seed))


def pieces(model: PreTrainedModel, cache: hf.Cache, ids: Tensor, seed: int) -> Tensor:
    """The logits of a text fed in pieces of random sizes."""
    draw, outputs, start = random.Random(seed), [], 0
    while start < ids.shape[1]:
        size = draw.choice([1, 1, 2, 3, 7, 13])
        piece, given = ids[:, start : start + size], {}
        if model.config.model_type == "bamba":  # counts from 0 in every call unless told
            given["position_ids"] = torch.arange(start, start + piece.shape[1])[None]
        outputs.append(model(piece, past_key_values=cache, **given).logits)
        start += size
    return torch.cat(outputs, 1)


@pytest.mark.parametrize(
    "name,policy",
    [(n, p) for n in (*FAMILIES, *HYBRIDS) for p in POLICIES]
    + [(n, p) for n in ("llama", "gpt_oss") for p in MORE]
    + [(n, "blend:6") for n in (*FAMILIES, *HYBRIDS) if n != "gemma2"],  # its soft cap takes no residual
)
@torch.no_grad()
def test_bounded_equals_the_definition(name: str, policy: str) -> None:
    model, ids = build(name).double(), some_ids(40)
    with slow_attention(model, policy) as layers:
        if name in HYBRIDS:  # their other layers round differently in other pieces
            want = pieces(model, hf.DynamicCache(config=model.config), ids, seed=len(name))
        else:
            want = model(ids, use_cache=False).logits
    cache = msrnn.cache(model, policy, chunk=11)
    got = pieces(model, cache, ids, seed=len(name))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)  # norms and rotations are float32 in any dtype
    assert (got[0].argmax(-1) == want[0].argmax(-1)).all()
    assert cache.held <= msrnn.parse_policy(policy).capacity
    assert len(layers) == len(list(cache.bounded))
    for index, state in layers.items():
        assert survivors(cache.layers[index].slots) == positions_held(state)


def test_a_residual_is_refused_under_a_soft_cap() -> None:
    model = build("gemma2")
    with pytest.raises(msrnn.Unsupported, match="soft cap"):
        model(some_ids(20), past_key_values=msrnn.cache(model, "blend:6"))


@torch.no_grad()
def test_the_slow_check_token_by_token() -> None:
    """Layer by layer over a text, or token by token through all layers: the definition does not care."""
    model, ids, policy = build("llama").double(), some_ids(30), "tova:5"
    with slow_attention(model, policy):
        whole = model(ids, use_cache=False).logits
    with slow_attention(model, policy) as layers:
        each = [model(ids[:, t : t + 1], position_ids=torch.tensor([[t]]), use_cache=False).logits for t in range(30)]
    torch.testing.assert_close(torch.cat(each, 1), whole, rtol=0, atol=2e-5)
    assert [len(state.rows[0]) for state in layers.values()] == [5, 5, 5]


@pytest.mark.parametrize(
    "name,feature",
    [("gemma2", "softcap"), ("gpt_oss", "sinks"), *((n, "window") for n in ("mistral", "qwen2", "gemma3", "gpt_oss"))],
)
@torch.no_grad()
def test_the_slow_check_would_notice(name: str, feature: str) -> None:
    """Soft caps, sinks and windows matter in these models: leaving one out shows."""
    model, ids, policy = build(name).double(), some_ids(40), "tova:20"
    with slow_attention(model, policy):
        want = model(ids, use_cache=False).logits
    with slow_attention(model, policy, off=feature):
        assert (model(ids, use_cache=False).logits - want).abs().max() > 1e-2
    cache = msrnn.cache(model, policy)
    torch.testing.assert_close(pieces(model, cache, ids, 1), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("attn,policy", [("eager", "tova:64"), ("sdpa", "tova:64"), ("sdpa", "h2o:64")])
@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS])
def test_room_for_everything_is_the_plain_model(name: str, attn: str, policy: str) -> None:
    if attn == "sdpa" and name in ONLY_EAGER:
        pytest.skip("the model has no sdpa")
    # transformers' sdpa leaves Gemma 2's soft cap out, so the plain text is another one there; eager has it
    changes = {"attn_logit_softcapping": None} if (name, attn) == ("gemma2", "sdpa") else {}
    model, ids = build(name, attn, **changes), some_ids(14, seed=1)
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert len(set(plain[0, 14:].tolist())) > 3, "a text that says something"
    cache = msrnn.cache(model, policy)
    assert model.generate(ids, max_new_tokens=24, do_sample=False, past_key_values=cache).tolist() == plain.tolist()
    assert cache.get_seq_length() == 14 + 23
    windows = [layer.window for layer in geometry(model)]
    assert [int(layer.slots.held.max()) for layer in cache.bounded] == [37 if w is None else w - 1 for w in windows]


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_without_rows_pass_through(name: str) -> None:
    model = build(name, "sdpa")
    cache = msrnn.cache(model, "tova:6")
    model.generate(some_ids(14), max_new_tokens=10, do_sample=False, past_key_values=cache)
    linear = [layer for layer in cache.layers if layer not in list(cache.bounded)]
    assert linear
    assert cache.held == 6
    own = {type(layer) for layer in hf.DynamicCache(config=model.config).layers}
    assert {type(layer) for layer in linear} <= own


def test_a_hybrid_starts_again_after_reset() -> None:
    model, ids = build("qwen3_next", "sdpa"), some_ids(14)
    cache = msrnn.cache(model, "tova:6")
    first = model.generate(ids, max_new_tokens=10, do_sample=False, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == cache.held == 0
    assert model.generate(ids, max_new_tokens=10, do_sample=False, past_key_values=cache).tolist() == first.tolist()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        "latent attention",
    ),
    "mamba": ("Mamba", {}, "no attention"),
    "llama4_text": ("Llama4Text", {"num_local_experts": 2, "attention_chunk_size": 8}, "chunked_attention"),
    "gemma3n_text": (
        "Gemma3nText",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        "shares keys and values",
    ),
    "falcon_h1": ("FalconH1", {"mamba_d_ssm": 64, **MAMBA}, "hybrid"),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}, "AttentionInterface"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    family, shape, why = REFUSED[name]
    config = getattr(hf, f"{family}Config")(**(BASE | shape))
    with torch.device("meta"):
        model = getattr(hf, f"{family.removesuffix('Text')}ForCausalLM")(config)
    with pytest.raises(msrnn.Unsupported, match=rf"{name}.*{why}"):
        msrnn.cache(model, "tova:6")
    assert "msrnn" not in (model.config._attn_implementation or "")


def test_no_heads_is_refused() -> None:
    config = hf.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(msrnn.Unsupported, match="rwkv has no attention"):
        msrnn.cache(hf.RwkvForCausalLM(config), "tova:6")


def test_encoder_decoder_is_refused() -> None:
    config = hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    with pytest.raises(msrnn.Unsupported, match="t5 is an encoder-decoder"):
        msrnn.cache(hf.T5ForConditionalGeneration(config), "tova:6")


def test_encoder_is_refused_when_run() -> None:
    """Nothing tells an encoder from a decoder before it makes its mask; then it is refused, not run unbounded."""
    config = hf.BertConfig(**(BASE | {"is_decoder": False}))
    model = hf.BertModel(config).eval()
    with pytest.raises(msrnn.BoundIgnored):
        model(some_ids(12), past_key_values=msrnn.cache(model, "tova:6"))


def test_attention_that_opens_its_keys_is_refused_when_run() -> None:
    """JetMoe repeats the keys before its attention function sees them."""
    model = hf.JetMoeForCausalLM(hf.JetMoeConfig(**BASE, kv_channels=8, num_local_experts=2)).eval()
    with pytest.raises(msrnn.BoundIgnored, match="opened a bounded cache"):
        model(some_ids(12), past_key_values=msrnn.cache(model, "tova:6"))
