"""What the plugin refuses, from configurations as vLLM builds them; tests/in_vllm has the same with vLLM itself."""

from types import SimpleNamespace

import pytest
import torch

from msrnn.vllm import refusals
from msrnn.vllm.plugin import KNOWN, Refused, check_version

LAYER = {
    "alibi_slopes": None,
    "logits_soft_cap": None,
    "kv_cache_dtype": "auto",
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
}


@pytest.fixture(autouse=True)
def policy(monkeypatch):
    monkeypatch.setenv("MSRNN_POLICY", "tova:64")


def config(**changes):
    """vLLM's configuration, as far as it is looked at; changes: `part__name=value`, or a whole part."""
    parts = {
        "speculative_config": None,
        "kv_transfer_config": None,
        "parallel_config": SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1
        ),
        "model_config": SimpleNamespace(
            use_mla=False,
            is_hybrid=False,
            is_mm_prefix_lm=False,
            dtype=torch.bfloat16,
            get_total_num_kv_heads=lambda: 4,
            get_total_num_hidden_layers=lambda: 3,
        ),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
    }
    for path, value in changes.items():
        part, _, name = path.partition("__")
        if name:
            setattr(parts[part], name, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)


OURS = SimpleNamespace(kv_connector_module_path="msrnn.vllm.connector")
OTHER = SimpleNamespace(kv_connector_module_path=None)


@pytest.mark.parametrize("changes", [{}, {"kv_transfer_config": OURS}, {"cache_config__cache_dtype": "bfloat16"}])
def test_what_is_supported_passes(changes):
    refusals.check(config(**changes))
    refusals.check_layer(**LAYER, use_irope=None, other=False)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"speculative_config": object()}, "speculative decoding .*leave --speculative-config out"),
        ({"kv_transfer_config": OTHER}, "KV connectors .*leave --kv-transfer-config and --kv-offloading-size out"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism .*use tensor or pipeline"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"model_config__use_mla": True}, "latent attention"),
        ({"model_config__is_hybrid": True}, "recurrent layers"),
        ({"model_config__is_mm_prefix_lm": True}, "looks ahead in images"),
        ({"cache_config__cache_dtype": "fp8"}, r"--kv-cache-dtype fp8: .*dtype \(bfloat16\); leave it out, .*kv=int8"),
        ({"cache_config__cache_dtype": "float16"}, r"--kv-cache-dtype float16: .*dtype \(bfloat16\)"),
    ],
)
def test_a_configuration_is_refused_by_name(changes, reason):
    with pytest.raises(Refused, match=f"msrnn cannot bound this: .*{reason}"):
        refusals.check(config(**changes))


@pytest.mark.parametrize("text", ["h2o:64", "tova:64;fade:64;tova:64"])
def test_processes_that_share_a_kv_head_must_decide_together(monkeypatch, text):
    monkeypatch.setenv("MSRNN_POLICY", text)
    refusals.check(config(parallel_config__tensor_parallel_size=4))
    with pytest.raises(Refused, match=r"more processes than KV heads, .*lower --tensor-parallel-size"):
        refusals.check(config(parallel_config__tensor_parallel_size=8))


@pytest.mark.parametrize("text", ["tova:64", "window+4:64", "tova-query-head:64"])
def test_policies_for_any_number_of_processes(monkeypatch, text):
    monkeypatch.setenv("MSRNN_POLICY", text)
    refusals.check(config(parallel_config__tensor_parallel_size=8))


@pytest.mark.parametrize("text", ["tova:64;h2o:64", "tova:64;h2o:64;tova:64;h2o:64"])
def test_policies_for_another_number_of_layers_are_refused(monkeypatch, text):
    monkeypatch.setenv("MSRNN_POLICY", text)
    with pytest.raises(Refused, match=r"the policy names [24] layers and the model has 3; give one"):
        refusals.check(config())


@pytest.mark.parametrize("text", ["tova:64;key_difference:64", "fade:8|key_difference-head:64"])
def test_a_policy_that_vllm_has_no_kernel_for_is_refused(monkeypatch, text):
    monkeypatch.setenv("MSRNN_POLICY", text)
    with pytest.raises(Refused, match="research policies have no kernel yet; use msrnn generate"):
        refusals.check(config())


@pytest.mark.parametrize("text", ["blend:64", "tova:64;tova:64,residual=0.9;tova:64", "fade:8|blend:64"])
def test_a_residual_takes_no_soft_cap(monkeypatch, text):
    refusals.check_layer(**LAYER | {"logits_soft_cap": 50.0})
    monkeypatch.setenv("MSRNN_POLICY", text)
    refusals.check(config(parallel_config__tensor_parallel_size=2))
    for nothing in (None, 0, 0.0):
        refusals.check_layer(**LAYER | {"logits_soft_cap": nothing})
    with pytest.raises(Refused, match=r"a residual needs logits without a soft cap, .*; use fade instead of blend"):
        refusals.check_layer(**LAYER | {"logits_soft_cap": 50.0})


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"attn_type": "encoder"}, "attention of type encoder"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "shares keys and values"),
        ({"kv_cache_dtype": "fp8_e5m2"}, r"quantised KV cache \(fp8_e5m2\)"),
        ({"use_irope": True, "b": 0}, "attention has b, use_irope, which msrnn does not know"),
        ({"c": torch.zeros(2)}, "attention has c, which msrnn does not know"),
    ],
)
def test_a_layer_is_refused_by_name(changes, reason):
    with pytest.raises(Refused, match=reason) as refused:
        refusals.check_layer(**(LAYER | changes))
    assert "\n" not in str(refused.value)


def test_only_tested_versions_of_vllm_are_accepted(monkeypatch):
    monkeypatch.delenv("MSRNN_ANY_VLLM", raising=False)
    for known in KNOWN:
        check_version(f"{known}.0")
    for version in ("0.29.1", "0.34.0", "0.320.0", "1.0.0"):
        with pytest.raises(Refused, match=f"vLLM {version} was never tried"):
            check_version(version)
    monkeypatch.setenv("MSRNN_ANY_VLLM", "1")
    check_version("1.0.0")
