"""What a bounded state does not support inside vLLM: refused at startup, by name and with the way out."""

from __future__ import annotations

from typing import Any

from ..core.slots import NO_SOFTCAP, decides_by_age
from ..plan import HeadPolicies, LayerPolicy, parts
from ..policy import Policy
from . import settings
from .plugin import Refused

_COPIES = (
    "there are more processes than KV heads, and those that share a KV head would evict different tokens; lower "
    "--tensor-parallel-size, or use a policy whose layers decide as one (tova, h2o-layer)"
)
_RESEARCH = "research policies have no kernel yet; use msrnn generate or msrnn eval, or a policy such as tova"


def check(config: Any) -> None:
    """config: vLLM's whole configuration."""
    settings.resolve(config.model_config)
    for unsupported, reason in _reasons(config):
        if unsupported:
            raise Refused(f"msrnn cannot bound this: {reason}")


def _reasons(config: Any) -> list[tuple[bool, str]]:
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config.cache_dtype
    dtype, layers, policies = name_of(model.dtype), model.get_total_num_hidden_layers(), settings.policies()
    return [
        (
            config.speculative_config is not None,
            "speculative decoding takes tokens back, and a state cannot; leave --speculative-config out",
        ),
        (
            _foreign(config.kv_transfer_config),
            "KV connectors move blocks of tokens; leave --kv-transfer-config and --kv-offloading-size out",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
            or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "context parallelism spreads one request's tokens; use tensor or pipeline parallelism",
        ),
        (bool(getattr(model, "use_mla", False)), "latent attention (MLA) caches no keys; there is nothing to choose"),
        (
            bool(getattr(model, "is_hybrid", False)),
            "the model has recurrent layers beside attention, and vLLM lays out the memory of both together",
        ),
        (
            bool(getattr(model, "is_mm_prefix_lm", False)),
            "the model's attention looks ahead in images; a state reads one token after the other",
        ),
        (
            cache not in ("auto", dtype),
            f"--kv-cache-dtype {cache}: states are stored in the model's dtype ({dtype}); leave it out, or use a "
            "policy with kv=int8",
        ),
        (
            any(_decided_by_copies(policy, _kv_heads(config), parallel.tensor_parallel_size) for policy in policies),
            _COPIES,
        ),
        (any(_is_research(policy) for policy in policies), _RESEARCH),
        (
            len(policies) not in (1, layers),
            f"the policy names {len(policies)} layers and the model has {layers}; give one policy, or one per layer",
        ),
    ]


def name_of(dtype: Any) -> str:
    """As vLLM's options have it."""
    return str(dtype).removeprefix("torch.")


def _kv_heads(config: Any) -> int:
    """Of a layer, in all processes together; with one process nobody asks."""
    return 1 if config.parallel_config.tensor_parallel_size == 1 else config.model_config.get_total_num_kv_heads()


def _decided_by_copies(policy: LayerPolicy, kv_heads: int, processes: int) -> bool:
    """Whether processes hold copies of a KV head and each decides by its own query heads."""
    return processes > kv_heads and any(part.scope == "kv_head" and not part.blind for part in parts(policy))


def _is_research(policy: LayerPolicy) -> bool:
    return any(part.rule is not None for part in parts(policy))


def _every_part() -> list[Policy]:
    """The policies of all layers, or of their KV heads."""
    return [part for policy in settings.policies() for part in parts(policy)]


def _foreign(transfer: Any) -> bool:
    """Whether a KV connector is configured that is not our own (`msrnn serve --prefix`)."""
    return transfer is not None and transfer.kv_connector_module_path != "msrnn.vllm.connector"


def check_policy(policy: LayerPolicy, kv_heads: int, processes: int) -> None:
    """Refuse a layer's policy before vLLM starts; kv_heads: of the layer, which the processes share."""
    if _is_research(policy):
        raise Refused(_RESEARCH)
    check_budgets(policy, max(1, kv_heads // processes), processes)
    if _decided_by_copies(policy, kv_heads, processes):
        raise Refused(_COPIES)


def decides_together(policy: LayerPolicy, window: int | None) -> bool:
    """Whether a layer's heads decide as one, so that processes which split them must agree."""
    return isinstance(policy, Policy) and policy.scope == "layer" and not decides_by_age(policy, window)


def check_sinks(policy: LayerPolicy, window: int | None, processes: int) -> None:
    """Refuse learned sinks where processes must agree: each has those of its own heads only."""
    if processes > 1 and decides_together(policy, window):
        raise Refused(
            f"the model has learned sinks, and --tensor-parallel-size {processes} splits heads that decide together; "
            "use one process, or a policy whose KV heads decide alone (tova-head, h2o)"
        )


def check_budgets(policy: LayerPolicy, kv_heads: int, processes: int) -> None:
    """Refuse budgets by KV head that do not fit the heads of a layer, of which each of the processes holds so many."""
    if isinstance(policy, HeadPolicies) and len(policy.heads) != kv_heads * processes:
        raise Refused(
            f"the policy has budgets for {len(policy.heads)} KV heads in a layer, and there are {kv_heads} per process "
            f"at --tensor-parallel-size {processes}; use a profile of this model and no more processes than KV heads"
        )


def check_layer(
    *,
    alibi_slopes: list[float] | None,
    logits_soft_cap: float | None,
    kv_cache_dtype: str,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
    **extra: Any,
) -> None:
    """Refuse arguments of an attention layer that would change what it sees."""
    if alibi_slopes is not None:
        raise Refused("the model's attention has ALiBi biases; msrnn cannot bound it")
    if logits_soft_cap and any(part.residual is not None for part in _every_part()):
        raise Refused(NO_SOFTCAP)
    if attn_type != "decoder":
        raise Refused(f"the model has attention of type {attn_type}; msrnn bounds decoders only")
    if kv_sharing_target_layer_name is not None:
        raise Refused("the model shares keys and values between layers; msrnn cannot bound it yet")
    if kv_cache_dtype not in ("auto", "float16", "bfloat16"):  # a checkpoint may ask for one
        advice = "leave --kv-cache-dtype at auto and add kv=int8 to the policy"
        raise Refused(f"a quantised KV cache ({kv_cache_dtype}); {advice}")
    unknown = sorted(name for name, value in extra.items() if value is not None and value is not False)
    if unknown:
        raise Refused(f"the model's attention has {', '.join(unknown)}, which msrnn does not know")
