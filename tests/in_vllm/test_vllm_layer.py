"""What vLLM asks of one layer, without an engine: backend class, spec, and attention split over processes."""

from types import SimpleNamespace

import pytest
import torch

from msrnn.plan import parse_layer_policy
from msrnn.policy import parse_policy


def full_spec(**changes):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "head_size_v": 8, "dtype": torch.float32}
    return FullAttentionSpec(**(sizes | changes))


@pytest.mark.parametrize("text", ["tova:16", "h2o:16", "h2o:16,gain=value_norm", "tova-query-head:16", "h2o:8|fade:24"])
def test_a_backend_class_gives_one_block_of_the_layouts_size(text):
    from msrnn.vllm.backend import BoundedBackend, backend_for
    from msrnn.vllm.block import Layout

    policy = parse_layer_policy(text)
    backend = backend_for(policy, 4)
    assert issubclass(backend, BoundedBackend)
    assert backend_for(policy, 4) is backend
    assert backend_for(policy, 2) is not backend
    spec = backend.customize_spec(full_spec())
    layout = Layout(policy, 4, 2, 8, 8, torch.float32)
    assert spec.page_size_bytes == layout.nbytes
    assert spec.block_size > 10**7, "no request needs a second block"


def test_processes_have_blocks_of_the_largest_share():
    """vLLM wants the same spec in all of them: two hold 2 of 4 KV heads with budgets."""
    from msrnn.vllm.backend import backend_for
    from msrnn.vllm.block import Layout

    spec = backend_for(parse_layer_policy("fade:8|fade:24|fade:16|fade:20"), 4).customize_spec(full_spec())
    small, large = (
        Layout(parse_layer_policy(text), 4, 2, 8, 8, torch.float32).nbytes
        for text in ("fade:8|fade:24", "fade:16|fade:20")
    )
    assert small < large == spec.page_size_bytes


@pytest.mark.parametrize("processes, kv_heads, share", [(1, 4, [8, 24, 16, 20]), (2, 2, [16, 20]), (4, 1, [24])])
def test_a_process_has_the_budgets_of_its_own_heads(monkeypatch, processes, kv_heads, share):
    from msrnn.vllm import shard

    rank = 0 if processes == 1 else 1
    monkeypatch.setattr(shard, "get_tensor_model_parallel_world_size", lambda: processes)
    monkeypatch.setattr(shard, "get_tensor_model_parallel_rank", lambda: rank)
    policy = shard.own_share(parse_layer_policy("fade:8|fade:24|fade:16|fade:20"), kv_heads)
    assert [head.capacity for head in policy.heads] == share


@pytest.mark.parametrize("processes, kv_heads", [(1, 3), (8, 1), (3, 1)])
def test_budgets_that_do_not_fit_the_processes_are_refused(monkeypatch, processes, kv_heads):
    """Another number of KV heads than the model has, or heads that several processes hold copies of."""
    from msrnn.vllm import shard
    from msrnn.vllm.plugin import Refused

    monkeypatch.setattr(shard, "get_tensor_model_parallel_world_size", lambda: processes)
    with pytest.raises(
        Refused, match=f"budgets for 4 KV heads .* {kv_heads} per process at --tensor-parallel-size {processes}"
    ):
        shard.own_share(parse_layer_policy("fade:8|fade:24|fade:16|fade:20"), kv_heads)


def test_a_layer_without_a_policy_has_no_block_size():
    from msrnn.vllm.backend import BoundedBackend
    from msrnn.vllm.plugin import Refused

    with pytest.raises(Refused, match="before it is loaded"):
        BoundedBackend.customize_spec(full_spec())


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"sliding_window": 32}, "cannot be bounded"),
        ({"attention_chunk_size": 32}, "cannot be bounded"),
        ({"dtype": torch.uint8}, "vLLM's own quantised KV cache"),
    ],
)
def test_other_specs_are_refused(changes, reason):
    from msrnn.vllm.backend import backend_for
    from msrnn.vllm.plugin import Refused

    with pytest.raises(Refused, match=reason):
        backend_for(parse_policy("tova:16"), 4).customize_spec(full_spec(**changes))


def test_only_layers_of_ours_are_bounded():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from msrnn.vllm.backend import backend_for, bounded_layers

    ours, stock = (
        SimpleNamespace(attn_backend=kind) for kind in (backend_for(parse_policy("h2o:8"), 2), CPUAttentionBackend)
    )
    layers = {"a": stock, "b": ours, "c": SimpleNamespace(), "d": SimpleNamespace(attn_backend=None)}
    assert bounded_layers(layers) == {"b": ours}


def test_a_process_uses_the_weights_of_its_own_heads():
    from msrnn.vllm.shard import Sharded

    attention = Sharded(1.0, rank=2, local_heads=3)
    assert attention.sharded
    assert attention.local(torch.arange(12)[None]).tolist() == [[6, 7, 8]]


@pytest.mark.parametrize("text", ["tova-head:8", "h2o:8", "tova-query-head:8", "window+2:8", "h2o-layer:8,last=8"])
def test_heads_that_decide_alone_are_not_gathered(text):
    """Before any process group exists: nothing asks for one."""
    from msrnn.core.attention import Attention
    from msrnn.vllm.shard import attention_of

    sinks = torch.zeros(4)
    attention = attention_of(parse_policy(text), 4, 0.5, 30.0, sinks)
    assert type(attention) is Attention
    assert (attention.scale, attention.softcap, attention.window) == (0.5, 30.0, None)
    assert attention.sinks is sinks
