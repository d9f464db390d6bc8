"""Tokens out of vLLM with the plugin, in fp32: stock vLLM's where nothing leaves, msrnn's own elsewhere."""

import pytest
from inside import NEW, engine, greedy


@pytest.fixture(scope="session")
def stock(model, prompts):
    with engine(model, None) as llm:
        assert not bounded(llm)
        return greedy(llm, prompts)


def bounded(llm) -> bool:
    from msrnn.adapters.vllm.spec import BoundedSpec

    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    return all(isinstance(group.kv_cache_spec, BoundedSpec) for group in groups)


def test_capacity_above_the_length_equals_stock_vllm(model, prompts, stock):
    with engine(model, "tova:600") as llm:
        assert bounded(llm)
        assert greedy(llm, prompts) == stock


@pytest.mark.parametrize("policy", ["tova:64", "tova:256", "window+4:64", "window+4:256", "h2o:64", "h2o:256"])
def test_a_mixed_batch_equals_each_text_alone(model, prompts, alone, policy):
    """All prompts at once: pieces of prompts and single tokens share batches."""
    with engine(model, policy) as llm:
        assert greedy(llm, prompts) == alone(policy)


def test_prompts_in_pieces_and_prefix_caching_change_nothing(model, prompts, alone):
    """Every batch has 96 tokens at most, and the second time vLLM would find all prompts in its prefix cache."""
    with engine(model, "h2o:64", max_num_batched_tokens=96, enable_prefix_caching=True) as llm:
        assert greedy(llm, prompts) == alone("h2o:64")
        assert greedy(llm, prompts) == alone("h2o:64")


def test_without_prefix_caching(model, prompts, alone):
    with engine(model, "tova:64", enable_prefix_caching=False, max_num_seqs=2) as llm:
        assert greedy(llm, prompts) == alone("tova:64")


def test_preempted_requests_begin_again_and_end_the_same(model, prompts, alone):
    from vllm import SamplingParams

    with engine(model, "tova:64") as llm:
        asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        for number, ids in enumerate(prompts):
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, asked)
        written, turn = {}, 0
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        while llm.llm_engine.has_unfinished_requests():
            for answer in llm.llm_engine.step():
                written[int(answer.request_id)] = list(answer.outputs[0].token_ids)
            turn += 1
            if turn in (4, 9):
                assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
                assert not scheduler.running
                assert len(scheduler.waiting) == len(prompts), "all are to begin again"
        assert turn >= 9
        assert [written[number] for number in range(len(prompts))] == alone("tova:64")


def test_layers_of_unequal_capacity(model, prompts):
    """One block per request still, of the size of all layers' states together; equal to the same plan outside vLLM."""
    import msrnn

    capacities = [16 + 4 * (layer % 7) for layer in range(30)]
    plan = ";".join(f"tova:{capacity}" for capacity in capacities)
    with engine(model, plan) as llm:
        written = greedy(llm, prompts[-1:])
    import torch

    loaded, _ = msrnn.load(model, dtype="float32")
    given = torch.tensor(prompts[-1:])
    cache = msrnn.cache(loaded, msrnn.spread("tova", capacities))
    kept = loaded.generate(given, past_key_values=cache, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert written == [kept[0, given.shape[1] :].tolist()]


def test_one_block_per_request_whatever_its_length(model):
    """What vLLM itself believes: as many requests as there are blocks, less the one it keeps."""
    from msrnn.adapters.vllm.spec import BoundedSpec

    with engine(model, "tova:64") as llm:
        config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        (group,) = config.kv_cache_groups
        assert isinstance(group.kv_cache_spec, BoundedSpec)
        page = group.kv_cache_spec.page_size_bytes
        assert page == group.kv_cache_spec.layout.nbytes
        assert config.num_blocks == (256 << 20) // (30 * page)
        assert page < 66 * 2 * 3 * 64 * 4 * 1.02
