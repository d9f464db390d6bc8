"""Layers with a window of the model's own inside vLLM: tiny random models give the transformers path's tokens."""

import pytest
import torch

from msrnn.plan import Plan, parse_layer_policy
from tests.in_vllm.engines import engine, greedy

WINDOW = 24
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "vocab_size": 128,
    "sliding_window": WINDOW,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 4}
MODELS = {
    "mistral": ("MistralConfig", {}),
    "gemma2": ("Gemma2Config", MIXED | {"query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", MIXED | {"query_pre_attn_scalar": 16}),
    "gpt-oss": ("GptOssConfig", MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
LENGTHS = (5, 90, 1, 30, 150)
POLICIES = (  # one for each layer
    *("tova:16", "h2o:16", "h2o:40", "tova:40", "window+4:16", "tova:16,gain=value_norm"),
    *("fade:40|blend:16", "h2o:9|blend:40"),
)


@pytest.fixture(scope="module", params=list(MODELS))
def tiny(request, tmp_path_factory):
    """The folder of a model with windows, and the model in transformers."""
    import transformers

    name, changes = MODELS[request.param]
    config = getattr(transformers, name)(**(SIZES | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return str(folder), model


def test_a_layer_keeps_its_own_window(tiny):
    """Capacities below and above the window, several kinds of policy; prompts in pieces, all in the same batches."""
    import msrnn

    folder, model = tiny
    capped = getattr(model.config, "attn_logit_softcapping", None)  # takes no residual
    policies = [text.replace("blend", "fade") if capped else text for text in POLICIES]
    torch.manual_seed(1)
    prompts = [torch.randint(3, 128, (length,)).tolist() for length in LENGTHS]
    options = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    with engine(folder, ";".join(policies), **options, kv_cache_memory_bytes=1 << 24) as llm:
        (group, *others) = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        assert not others, "one block per request for all layers"
        assert len(group.layer_names) == len(policies)
        outputs = greedy(llm, prompts, 8)
    plan, model.generation_config.eos_token_id = Plan(tuple(map(parse_layer_policy, policies))), None
    for ids, tokens in zip(prompts, outputs, strict=True):
        inputs = torch.tensor([ids])
        cache = msrnn.cache(model, plan)
        expected = model.generate(inputs, past_key_values=cache, do_sample=False, max_new_tokens=8)
        assert tokens == expected[0, len(ids) :].tolist()
