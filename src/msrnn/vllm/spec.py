"""The KV cache spec of a layer, as vLLM allocates by it: one block per request, of the size of its slots."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec, KVQuantMode

from ..plan import LayerPolicy
from .block import Layout
from .plugin import Refused
from .shard import shares

_TOKENS = 2**24  # "tokens per block": more than any text has, so that a request never needs a second block


@dataclass(frozen=True, kw_only=True)
class BoundedSpec(CircularBufferSpec):  # type: ignore[misc]
    """A block is one opaque run of bytes, so layers of unequal capacity still share a KV cache group.

    policy: of all KV heads of the layer, as vLLM wants the same spec in every process.
    """

    policy: LayerPolicy
    query_heads: int
    window: int | None = None


def bounded_spec(spec: Any, policy: LayerPolicy, heads: int, window: int | None = None) -> BoundedSpec:
    """Replace the spec of a layer, to which vLLM would give one block after the other; window: the model's own.

    Where processes hold KV heads with budgets of their own, all have blocks of the size that the largest share needs.
    """
    if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size or spec.non_causal:
        raise Refused(f"a layer with a {type(spec).__name__} of vLLM cannot be bounded: {spec}")
    if spec.kv_quant_mode != KVQuantMode.NONE or not spec.dtype.is_floating_point:
        raise Refused("vLLM's own quantised KV cache; leave --kv-cache-dtype at auto and add kv=int8 to the policy")
    names = {field.name for field in fields(spec)}  # vLLM 0.30 knows fewer than 0.32
    shared = {"num_kv_heads", "head_size", "head_size_v", "dtype", "max_tp_shards"} & names
    values = {name: getattr(spec, name) for name in shared} | dict.fromkeys({"dcp_sharded"} & names, False)
    sizes = (heads, spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.dtype, window)
    return BoundedSpec(
        **values,
        policy=policy,
        query_heads=heads,
        window=window,
        block_size=_TOKENS,
        tokens_per_state=_TOKENS,
        num_head_slots=1,
        state_content_bytes=max(Layout(share, *sizes).nbytes for share in shares(policy, spec.num_kv_heads)),
    )
