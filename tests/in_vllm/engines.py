"""vLLM's engine in this process, with the plugin on or off, and what tests ask of it."""

import gc
import os
import sys
from contextlib import contextmanager
from itertools import cycle, islice

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process: no others to wait for
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

NEW = 16
MEMORY = 256 << 20
# On a CPU, vLLM allocates what its pipeline stages pass on in a warm-up that it skips where nothing is compiled; so the
# graph is traced, but not compiled.
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}


@contextmanager
def _without_llvmlite():
    """vLLM inspects every loaded module when an engine starts, and fails on llvmlite's, which numba has loaded."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
    try:
        yield
    finally:
        sys.modules.update(hidden)


@contextmanager
def engine(model: str, policy: str | None, **options):
    """vLLM with the plugin on (or stock, for None), as `vllm serve` would set it up."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from msrnn.vllm import POLICY, register

    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": MEMORY,
        "disable_log_stats": False,
    }
    os.environ.pop(POLICY, None)
    if policy is not None:
        os.environ[POLICY] = policy
    register()
    llm = None
    try:
        with _without_llvmlite():
            llm = LLM(model, **(settings | options))
        yield llm
    finally:
        os.environ.pop(POLICY, None)
        for backend in AttentionBackendEnum:
            backend.clear_override()
        selector._cached_get_attn_backend.cache_clear()
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def greedy(llm, prompts: list[list[int]], tokens: int = NEW, **extra: str) -> list[list[int]]:
    """The greedy tokens after each prompt; extra: request arguments of ours (`prefix_id`)."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra or None)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def generate_alone(hf_model, policy: str, ids: list[int], tokens: int = NEW) -> list[int]:
    """The greedy tokens after a prompt on its own, as msrnn's transformers path generates them."""
    import torch

    import msrnn

    inputs = torch.tensor([ids])
    output = hf_model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        past_key_values=msrnn.cache(hf_model, plan_of(policy)),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
    return output[0, len(ids) :].tolist()


def in_turn(*policies: str, layers: int = 30) -> str:
    """MSRNN_POLICY for layers that have these policies in turn."""
    return ";".join(islice(cycle(policies), layers))


def plan_of(text: str):
    """The policies of MSRNN_POLICY, as the transformers path takes them."""
    from msrnn.vllm.settings import parse

    return list(parse(text)) if ";" in text else text


def build_prefix(hf_model, model: str, folder, name: str, ids: list[int], policy: str) -> str:
    """The state file of a prefix, as `msrnn state build` writes it, from token ids."""
    import msrnn
    from msrnn.hf.identity import weights_digest

    rnn = msrnn.RNN(hf_model, plan_of(policy))
    _, state = rnn.read(ids, rnn.start())
    path = folder / f"{name}.state"
    state.save(path, tokens=ids, notes={"weights": weights_digest(model)})
    return str(path)


def connector(files: dict[str, str], **options: int) -> dict:
    """vLLM's option for prefixes, as `msrnn serve --prefix` passes it; options: `states` and `every` of the pool."""
    from msrnn.vllm.prefix import CONNECTOR, FILES

    return CONNECTOR | {"kv_role": "kv_consumer", "kv_connector_extra_config": {FILES: files, **options}}


def external_hits(llm) -> float:
    """Tokens that came from prefixes."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:external_prefix_cache_hits")
