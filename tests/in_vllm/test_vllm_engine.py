"""Tokens from vLLM with the plugin, in float32: stock vLLM's where nothing is evicted, else the transformers path's.

An engine takes many seconds to start, so tests share one: those with the same `running` follow each other.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from msrnn.plan import Plan, parse_layer_policy
from tests.in_vllm.engines import MEMORY, NEW, engine, greedy, in_turn, plan_of


@dataclass(frozen=True)
class Setup:
    """An engine with the plugin on: its policy, and options of vLLM that must not change the tokens."""

    policy: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.policy, *(f"{name}={value}" for name, value in self.options.items())])


PIECES = {"max_num_batched_tokens": 96, "enable_prefix_caching": True}  # every batch has 96 tokens at most
SETUPS = {  # pytest puts tests with the same number in their list of setups together: those with more tests come first
    setup.policy: setup
    for setup in (
        Setup("tova:64", {"enable_prefix_caching": True}),
        Setup("h2o:64", PIECES),
        Setup("blend:64", PIECES),
        Setup("window+4:64", PIECES),
        Setup("fade:64", PIECES),
        Setup("tova:256", {"enable_prefix_caching": False, "max_num_seqs": 2}),
        Setup("window+4:256"),
        Setup("fade:256"),
        Setup("h2o:256", {"enable_prefix_caching": False}),
    )
}


@pytest.fixture(scope="module")
def running(request, model):
    with engine(model, request.param.policy, **request.param.options) as llm:
        yield llm, request.param.policy


def on(*policies: str):
    return pytest.mark.parametrize("running", [SETUPS[policy] for policy in policies], indirect=True, ids=str)


def scheduler(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def bounded(llm) -> bool:
    from msrnn.vllm.spec import BoundedSpec

    return all(isinstance(group.kv_cache_spec, BoundedSpec) for group in scheduler(llm).kv_cache_config.kv_cache_groups)


def test_capacity_above_the_length_equals_stock_vllm(model, prompts):
    with engine(model, None) as llm:
        assert not bounded(llm)
        stock = greedy(llm, prompts)
    with engine(model, "tova:600") as llm:
        assert bounded(llm)
        assert greedy(llm, prompts) == stock


@on(*SETUPS)
def test_a_mixed_batch_equals_each_text_alone(running, prompts, alone):
    """All prompts at once: pieces of prompts and single tokens share batches."""
    llm, policy = running
    assert bounded(llm)
    assert greedy(llm, prompts) == alone(policy)


@on("tova:64", "h2o:64", "blend:64")
def test_prompts_that_vllm_has_read_before_change_nothing(running, prompts, alone):
    """Prefix caching is on: a state has no blocks of tokens to reuse, and none is reused by mistake."""
    llm, policy = running
    greedy(llm, prompts, 1)
    assert greedy(llm, prompts) == alone(policy)


@on("tova:64", "h2o:64", "blend:64", "window+4:64", "fade:64")
def test_preempted_requests_start_over_and_end_the_same(running, prompts, alone):
    from vllm import SamplingParams

    llm, policy = running
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for number, ids in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    tokens, turn = {}, 0
    while llm.llm_engine.has_unfinished_requests():
        for answer in llm.llm_engine.step():
            tokens[int(answer.request_id)] = list(answer.outputs[0].token_ids)
        turn += 1
        if turn in (4, 9):
            assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
            assert not scheduler(llm).running
            assert len(scheduler(llm).waiting) == len(prompts), "all start over"
    assert turn >= 9
    assert [tokens[number] for number in range(len(prompts))] == alone(policy)


@on("tova:64")
def test_one_block_per_request_whatever_its_length(running):
    """vLLM's own account: as many requests as there are blocks, less its null block."""
    from msrnn.vllm.spec import BoundedSpec

    config = scheduler(running[0]).kv_cache_config
    (group,) = config.kv_cache_groups
    assert isinstance(group.kv_cache_spec, BoundedSpec)
    page = group.kv_cache_spec.page_size_bytes
    assert config.num_blocks == MEMORY // (30 * page)
    assert page < 66 * 2 * 3 * 64 * 4 * 1.02


@on("tova:64")
def test_every_layer_has_its_policy_and_its_blocks(running):
    from msrnn.core.attention import Attention
    from msrnn.vllm.backend import backend_for, bounded_layers

    llm, policy = running
    layers = bounded_layers(llm.llm_engine.vllm_config.compilation_config.static_forward_context)
    config = scheduler(llm).kv_cache_config
    assert len(layers) == 30
    for layer in layers.values():
        impl = layer.impl
        assert str(impl.policy) == policy
        assert layer.attn_backend is backend_for(impl.policy, 9)
        assert type(impl.attention) is Attention, "one process has all heads"
        blocks = impl.blocks(layer)
        assert len(blocks.keys) == config.num_blocks
        assert blocks.limit == 65
        assert blocks.keys.untyped_storage().data_ptr() == layer.kv_cache.untyped_storage().data_ptr()
        assert impl.layout(layer).nbytes == config.kv_cache_groups[0].kv_cache_spec.page_size_bytes


@on("tova:64")
def test_no_memory_of_layers_is_kept(running, prompts, alone):
    llm, policy = running
    assert gives_memory_back(llm, prompts)
    assert greedy(llm, prompts[:2]) == alone(policy)[:2]


def gives_memory_back(llm, prompts) -> bool:
    """Whether layers let go of memory that they had for a while: vLLM needs back what its memory profile gave them."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from msrnn.vllm.backend import bounded_layers

    layers = bounded_layers(llm.llm_engine.vllm_config.compilation_config.static_forward_context).values()
    before = [layer.kv_cache for layer in layers]
    for layer, memory in zip(layers, before, strict=True):
        layer.kv_cache = torch.empty_strided(memory.shape, memory.stride(), dtype=memory.dtype).zero_()
    used = [StorageWeakRef(layer.kv_cache.untyped_storage()) for layer in layers]
    greedy(llm, prompts, 4)
    for layer, memory in zip(layers, before, strict=True):
        layer.kv_cache = memory
    return all(storage.expired() for storage in used)


@on("tova:64")
def test_new_metadata_builders_publish_the_same_metrics(running, prompts, alone, monkeypatch, tmp_path):
    """On a GPU vLLM makes them twice: for its memory profile of CUDA graphs, and after it."""
    llm, policy = running
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    before = [(group, group.metadata_builders) for groups in runner.attn_groups for group in groups]
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    try:
        for _ in range(2):
            for group, _ in before:
                group.create_metadata_builders(runner.vllm_config, runner.device)
            assert greedy(llm, prompts[:2]) == alone(policy)[:2]
        assert all(group.metadata_builders[0].meter is not None for group, _ in before)
    finally:
        for group, builders in before:
            group.metadata_builders = builders


def test_a_piece_of_each_of_many_prompts(model, prompts, alone, monkeypatch):
    """With the options that `msrnn serve` sets on a GPU."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from msrnn.vllm.lane_count import WORKER

    batches, schedule = [], Scheduler.schedule

    def noting(self, *arguments, **options):
        output = schedule(self, *arguments, **options)
        batches.append(sorted(output.num_scheduled_tokens.values()))
        return output

    monkeypatch.setattr(Scheduler, "schedule", noting)
    limits = {"long_prefill_token_threshold": 32, "long_prefill_token_threshold_adaptive": True}
    with engine(model, "tova:64", max_num_batched_tokens=256, worker_cls=WORKER, **limits) as llm:
        assert greedy(llm, prompts) == alone("tova:64")
        assert [1, 5, 40, 51, 51] in batches, "a fifth of the batch, not all of a prompt"
        assert [greedy(llm, [ids])[0] for ids in prompts] == alone("tova:64")
        assert [256] in batches, "who is alone has no limit"


def test_layers_of_unequal_kind_and_capacity(model, prompts, hf_model):
    """Still one block per request and layer; the tokens equal those of the same plan outside vLLM.

    So every kind of policy runs inside vLLM: scores, gains, residuals and protected positions are part of a block.
    """
    import torch

    import msrnn
    from msrnn.hf.geometry import geometry
    from msrnn.vllm import settings
    from msrnn.vllm.cost import price

    kinds = ("tova:{}", "tova-head:{}", "tova-query-head:{}", "tova+2:{},last=4,momentum=0.5", "fade:{}", "h2o:{}")
    kinds += ("h2o-layer+1:{}", "window:{}", "window+4:{}", "tova:{},gain=value_norm", "h2o:{},gain=value_norm")
    kinds += ("blend:{}", "tova+2:{},residual=0.9")
    kinds += ("fade:{}|fade:9|fade:71", "h2o:8|h2o:{}|window+4:60", "blend:{}|blend:9|fade:71")  # budgets by KV head
    plan = Plan(tuple(parse_layer_policy(kinds[n % len(kinds)].format(24 + 4 * (n % 7))) for n in range(30)))
    assert plan.by_head
    with engine(model, settings.write(plan)) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert [layer.impl.policy for layer in layers] == list(plan.policies)
        blocks = sum(layer.impl.layout(layer).nbytes for layer in layers)
        assert blocks == price(geometry(hf_model), plan, torch.float32, 1)[0], "what msrnn serve says"
        assert scheduler(llm).kv_cache_config.num_blocks == MEMORY // blocks
        outputs = greedy(llm, prompts[-2:])
        assert gives_memory_back(llm, prompts[-2:])
    for ids, tokens in zip(prompts[-2:], outputs, strict=True):
        inputs, cache = torch.tensor([ids]), msrnn.cache(hf_model, plan)
        lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        expected = hf_model.generate(inputs, past_key_values=cache, do_sample=False, **lengths)
        assert tokens == expected[0, len(ids) :].tolist()


def test_best_becomes_the_plan_that_it_stands_for(model, prompts, hf_model):
    """The profile is found by the model's files. Codes on a border may differ by path, so tokens are not compared."""
    import msrnn

    with engine(model, "best:16") as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        policies = tuple(layer.impl.policy for layer in layers.values())
        assert bounded(llm)
        assert [len(tokens) for tokens in greedy(llm, prompts[:1])] == [NEW]
    plan = msrnn.RNN(hf_model, "best:16").plan
    assert policies == plan.policies
    assert not plan.uniform


def test_slots_of_fewer_bits(model, prompts, hf_model):
    """Codes are rounded from keys that differ in the last bits, so a few tokens may differ; read on as vLLM did."""
    import torch

    import msrnn

    policy = in_turn("tova:64,kv=int8", "h2o:48,kv=k8v4")
    with engine(model, policy) as llm:
        answers = greedy(llm, prompts[3:])
    rnn, equal = msrnn.RNN(hf_model, plan_of(policy)), []
    for ids, tokens in zip(prompts[3:], answers, strict=True):
        logits, state = rnn.read(ids, rnn.start())
        for token in tokens:
            equal.append(int(logits.argmax()) == token)
            logits, state = rnn.step(torch.tensor([[token]]), state)
    assert sum(equal) > 0.8 * len(equal)
