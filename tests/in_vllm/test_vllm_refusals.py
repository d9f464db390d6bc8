"""Plain vLLM with a policy in the environment: what a bounded state does not support ends startup in vLLM's processes.

`msrnn serve` refuses most of this before vLLM starts (tests/cli/test_serve_refusals.py); here there is only the plugin.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.in_vllm.engines import engine, greedy
from tests.in_vllm.test_vllm_server import metric, wait_for_server

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "vocab_size": 128,
    "dtype": "float32",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": None,
    "first_k_dense_replace": 2,
}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_dim": 64,
    "block_dim": 64,
    "block_multiple_of": 16,
    "block_auto_adjust_ff_dim": False,
    "block_ffn_dim_multiplier": 1.0,
}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
SMALL = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.fixture
def tiny(tmp_path):
    """A model's configuration; its weights are random."""

    def write(kind: dict) -> str:
        sizes = {name: size for name, size in (SIZES | kind).items() if size is not None}
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    "kind, options, reason",
    [
        (LLAMA, {"speculative_config": NGRAM}, "speculative decoding takes tokens back"),
        (LLAMA, {"kv_transfer_config": CONNECTOR}, "KV connectors move blocks of tokens"),
        (LLAMA, {"kv_cache_dtype": "fp8"}, "states are stored in the model's dtype|not supported by the CPU"),
        (DEEPSEEK, {}, "latent attention"),
        (LFM2, {}, "recurrent layers beside attention"),
    ],
    ids=["speculative", "connector", "fp8", "mla", "hybrid"],
)
def test_an_engine_does_not_start(tiny, kind, options, reason):
    from msrnn.vllm.plugin import Refused

    error = ValueError if "kv_cache_dtype" in options else Refused  # fp8 is refused by vLLM 0.33 itself on a CPU
    with pytest.raises(error, match=reason) as refused, engine(tiny(kind), "tova:64", **SMALL, **options):
        pytest.fail("it runs unbounded")
    assert "\n" not in str(refused.value)


def test_a_residual_and_a_soft_cap_do_not_start(tiny):
    from msrnn.vllm.plugin import Refused

    reason = "a residual needs logits without a soft cap, .*; use fade instead of blend"
    with pytest.raises(Refused, match=reason), engine(tiny(GEMMA2), "blend:64", **SMALL):
        pytest.fail("its logits are not linear in the key")


def test_budgets_for_another_number_of_kv_heads_do_not_start(tiny):
    from msrnn.vllm.plugin import Refused

    reason = "the policy has budgets for 3 KV heads in a layer, and there are 2 per process at"
    with pytest.raises(Refused, match=reason), engine(tiny(LLAMA), "fade:8|fade:9|fade:10", **SMALL):
        pytest.fail("a head has no budget")


@pytest.mark.parametrize("layers", [(0, 1), (1,)], ids=["all layers", "one layer"])
def test_a_model_that_names_its_attention_backend_does_not_start(tiny, monkeypatch, layers):
    """As Step5 and openPangu do: such a layer never asks which backend is registered."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from msrnn.vllm.plugin import Refused

    def attention(*sizes: object, prefix: str, **options: object) -> Attention:
        own = {"attn_backend": CPUAttentionBackend} if any(f".{layer}." in prefix for layer in layers) else {}
        return Attention(*sizes, prefix=prefix, **(options | own))

    monkeypatch.setattr("vllm.model_executor.models.llama.Attention", attention)
    reason = rf"model.layers.{layers[0]}.self_attn.attn has a FullAttentionSpec of vLLM"
    with pytest.raises(Refused, match=reason), engine(tiny(LLAMA), "tova:64", **SMALL):
        pytest.fail("it runs unbounded")


def test_the_same_engine_starts_without_them(tiny):
    """Or the refusals above would prove nothing."""
    with engine(tiny(LLAMA), "tova:64", **SMALL) as llm:
        assert len(greedy(llm, [[1, 2, 3]], 2)[0]) == 2


@pytest.mark.parametrize("worker", ["CPU_ATTN", "any layout"])
def test_a_worker_that_the_policy_did_not_reach_ends_the_start(tiny, worker):
    """With tensor parallelism, specs of one layer differ; with pipeline parallelism, only the workers' layouts do."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout

    from msrnn.vllm.backend import BoundedBackend

    stock = [CPUAttentionBackend] if worker == "CPU_ATTN" else []
    layouts = [[layout.name for layout in get_supported_kv_cache_layouts(of)] for of in ([BoundedBackend], stock)]
    config = EngineArgs(tiny(LLAMA), skip_tokenizer_init=True).create_engine_config()
    with pytest.raises(AssertionError, match="Workers disagree"):
        resolve_kv_cache_layout(config, layouts)
    assert resolve_kv_cache_layout(config, layouts[:1] * 2).name == layouts[0][0]


def plain_command(model: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager"]
    small = ["--load-format", "dummy", "--skip-tokenizer-init", "--kv-cache-memory-bytes", str(1 << 24)]
    return [*command, *small, *options]


def plain_environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return inherited | {"VLLM_LOGGING_LEVEL": "ERROR"} | more


def plain_server(model: str, *options: str, **environment: str) -> str:
    """The output of vLLM's own server, which must end with an error."""
    result = subprocess.run(
        plain_command(model, *options),
        env=plain_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert result.returncode != 0
    return result.stdout


def test_vllms_own_server_is_bounded_by_the_environment_alone(tiny, tmp_path):
    """Without `msrnn serve`: the policy, and a folder for the metrics, which count the first layer's first KV head."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    environment = plain_environment(MSRNN_POLICY="fade:16|fade:40;tova:16", PROMETHEUS_MULTIPROC_DIR=str(metrics))
    with (tmp_path / "log").open("w") as log:
        command = plain_command(tiny(LLAMA), "--port", str(port), "--served-model-name", "tiny")
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_for_server(process, port, tmp_path / "log")
        url = f"http://127.0.0.1:{port}"
        body = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 4, "ignore_eos": True, "detokenize": False}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        assert metric(url, "msrnn_request_tokens_held_max") == metric(url, "msrnn_capacity") == 16
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_worker_of_the_server_refuses_and_the_server_ends(tiny):
    output = plain_server(tiny(LLAMA), "--speculative-config", json.dumps(NGRAM), MSRNN_POLICY="tova:64")
    assert re.search(
        r"Refused: .*speculative decoding takes tokens back.*leave --speculative-config out$", output, re.M
    )


@pytest.mark.parametrize(
    "policy, reason",
    [
        ("tova:64", "Refused: vLLM 0.99.0 was never tried"),
        ("tovva:64", "did you mean 'tova:64'"),
        ("", "MSRNN_POLICY is set but empty; write e.g. MSRNN_POLICY=tova:512, or unset it"),
    ],
    ids=["version", "policy", "MSRNN_POLICY=$UNSET"],
)
def test_an_untested_vllm_and_an_unknown_policy_end_the_server(tiny, tmp_path, policy, reason):
    """Metadata that says 0.99 comes first on the path."""
    if "0.99" in reason:
        about = tmp_path / "path" / "vllm-0.99.0.dist-info" / "METADATA"
        about.parent.mkdir(parents=True)
        about.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0\n")
    output = plain_server(tiny(LLAMA), MSRNN_POLICY=policy, PYTHONPATH=str(tmp_path / "path"))
    assert re.search(reason, output)
