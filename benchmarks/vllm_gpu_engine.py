"""The engine that benchmarks/vllm_gpu.py measures: vLLM with a model of a given shape and random weights."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import tempfile
import time
from contextlib import redirect_stdout
from typing import Any

# As the models have it. With less, a token's weight changes within a long text, and `steady` attention is not steady.
ROPE_THETA = {"llama-3-8b": 500000.0, "llama-2-7b": 10000.0}
# Of what a head's queries share. `trained`: about as many decisions are near as where SmolLM2 reads a book.
STRENGTH = {"flat": 0, "steady": 4, "trained": 7}
SMALL_KV = 64 << 20  # bytes for keys and values with --small


class Timeline(logging.Handler):
    """When vLLM logged what while it started: [seconds, message], where it had said nothing for half a second."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = self._last = time.perf_counter()
        self.messages: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        now = time.perf_counter()
        if now - self._last > 0.5:
            self.messages.append((round(now - self.begin, 1), record.getMessage()[:100]))
        self._last = now


def start(options: argparse.Namespace, engine: str) -> tuple[Any, float, list[tuple[float, str]]]:
    """vLLM's engine in this process, the seconds until it takes requests, and what it logged meanwhile."""
    folder = model_folder(options.shape, options.small)
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "dtype": "bfloat16",
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.budget,
        "long_prefill_token_threshold": options.threshold if engine == "msrnn" else 0,
        "long_prefill_token_threshold_adaptive": engine == "msrnn",
    }
    if engine == "stock":
        settings["kv_cache_dtype"] = options.kv_cache_dtype
    elif not options.no_lanes:
        from msrnn.vllm.lane_count import WORKER

        settings["worker_cls"] = WORKER
    if options.utilization:
        settings["gpu_memory_utilization"] = options.utilization
    if options.kv_gib:  # no memory profile; the utilization is then only asked of what is free at the start
        settings |= {"kv_cache_memory_bytes": int(options.kv_gib * 2**30), "gpu_memory_utilization": 0.05}
    if options.graphs:
        settings["compilation_config"] = {"cudagraph_mode": options.graphs}
    if options.small:
        settings |= {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "kv_cache_memory_bytes": SMALL_KV,
        }
        settings |= {"max_num_seqs": 32, "max_num_batched_tokens": 512}
        settings["long_prefill_token_threshold"] = 64 if engine == "msrnn" else 0
    timeline = Timeline()
    logging.getLogger("vllm").addHandler(timeline)
    llm = LLM(**settings)
    logging.getLogger("vllm").removeHandler(timeline)
    return llm, time.perf_counter() - timeline.begin, timeline.messages


def model_folder(name: str, small: bool = False) -> str:
    """A folder with a configuration and no weights."""
    from msrnn.bench.shapes import config

    changes: dict[str, Any] = {"attention_bias": True, "max_position_embeddings": 131072}
    changes["rope_parameters"] = {"rope_type": "default", "rope_theta": ROPE_THETA[name]}
    changes |= {"hidden_size": 256} if small else {}  # vLLM on a CPU has no heads of 16
    shape = config("tiny" if small else name, **changes)
    shape.architectures = ["LlamaForCausalLM"]
    shape.bos_token_id, shape.eos_token_id = 1, 2
    folder = tempfile.mkdtemp(prefix="msrnn-shape-")
    shape.save_pretrained(folder)
    return folder


def set_weights(llm: Any, attention: str) -> None:
    """Random weights as transformers initialises them; unless `flat`, every head's queries share a slow direction."""
    import torch

    @torch.no_grad()
    def change(model: Any) -> None:
        config = model.config
        generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.fill_(1)
            elif name.endswith("bias"):
                tensor.zero_()
            else:
                tensor.normal_(0, 0.02, generator=generator)
            if attention != "flat" and name.endswith("qkv_proj.bias"):
                size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
                half = tensor[: config.num_attention_heads * size].view(config.num_attention_heads, 2, size // 2)
                half[:, :, size // 2 * 5 // 8 :].normal_(0, STRENGTH[attention], generator=generator)

    llm.apply_model(change)


def memory_of(llm: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Blocks and bytes that vLLM has allocated, and beside them what was known before the start.

    `info_blocks`: as many requests as `msrnn info --memory` fits into the GPU's memory times the utilization, or into
    --kv-gib. It leaves out what else vLLM needs: activations, CUDA graphs, buffers. With stock vLLM that is
    total_bytes x gpu_memory_utilization - weight_bytes - kv_bytes.
    """
    import torch

    core = llm.llm_engine.engine_core.engine_core
    cache = core.scheduler.kv_cache_config
    about = {"blocks": cache.num_blocks, "kv_bytes": sum(tensor.size for tensor in cache.kv_cache_tensors)}
    config = llm.llm_engine.vllm_config
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (None, None)
    share, info = config.cache_config.gpu_memory_utilization, info_of(config.model_config.model, options)
    about |= {"free_bytes": free, "total_bytes": total, "gpu_memory_utilization": share}
    about["weight_bytes"] = info["weight_bytes"]
    if os.environ.get("MSRNN_POLICY"):
        about |= {"request_bytes": request_bytes(config.model_config), "info_state_bytes": info["state_bytes"]}
        about["info_blocks"] = fitting(info, options, total, share)
    return about


def request_bytes(model: Any) -> int:
    """Of a request's blocks in all layers, by vLLM's configuration of the model."""
    from msrnn.hf.geometry import geometry
    from msrnn.plan import Plan
    from msrnn.policy import parse_policy
    from msrnn.vllm.cost import price

    layers = geometry(model.hf_config)
    plan = Plan((parse_policy(os.environ["MSRNN_POLICY"]),) * len(layers))
    return price(layers, plan, model.dtype, model.max_model_len)[0]


def info_of(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """What `msrnn info --json` says, which needs neither vLLM nor a GPU."""
    from msrnn.cli import main

    dtype, said = "float32" if options.small else "bfloat16", io.StringIO()
    question = ["info", folder, options.policy, "--dtype", dtype, "--length", str(options.max_model_len), "--json"]
    with redirect_stdout(said):
        code = main(question)
    if code:
        raise SystemExit(f"msrnn {' '.join(question)}: exit code {code}")
    facts: dict[str, Any] = json.loads(said.getvalue())
    return facts


def fitting(info: dict[str, Any], options: argparse.Namespace, total: int | None, share: float) -> int | None:
    """Requests that fit into the memory for states, all that is left after the weights."""
    states = SMALL_KV if options.small else int(options.kv_gib * 2**30) if options.kv_gib else None
    if states is None and total is not None:
        states = int(total * share) - info["weight_bytes"]
    return None if states is None else states // info["state_bytes"]
