"""Tensor and pipeline parallelism: the tokens are those of one process."""

import os
from itertools import cycle, islice

import pytest

from msrnn.vllm.pool import SCHEDULER
from tests.in_vllm.engines import TRACED, build_prefix, connector, engine, external_hits, greedy, in_turn

BY_HEAD = "fade:20|fade:64|fade:108"


@pytest.mark.parametrize(
    "policy, processes, options",
    [
        ("tova:64", 3, {"tensor_parallel_size": 3}),  # 9 query heads, 3 KV heads, and all decide together
        (in_turn("h2o-layer:64,gain=value_norm", "blend-layer:64", BY_HEAD), 3, {"tensor_parallel_size": 3}),
        (in_turn("h2o:64", BY_HEAD, "blend:64"), 2, {"pipeline_parallel_size": 2, **TRACED}),
    ],
    ids=["tensor", "tensor with gains, residuals and budgets by head", "pipeline"],
)
def test_several_processes_generate_what_one_does(
    model, hf_model, prompts, alone, monkeypatch, tmp_path, policy, processes, options
):
    """Also where requests start from a prefix or the pool, of which every process loads its heads or its layers."""
    cores = map(str, islice(cycle(sorted(os.sched_getaffinity(0))), processes))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(cores))
    texts = {"long": prompts[-1][:325], "short": prompts[1][:30]}  # one has evicted tokens, the other none yet
    files = {name: build_prefix(hf_model, model, tmp_path, name, ids, policy) for name, ids in texts.items()}
    pool = connector(files, states=16, every=64)
    options = {"scheduler_cls": SCHEDULER, **options}
    with engine(model, policy, kv_transfer_config=pool, **options) as llm:
        assert llm.llm_engine.vllm_config.parallel_config.world_size == processes
        assert greedy(llm, prompts, prefix_id="none") == alone(policy)
        assert external_hits(llm) == 0, "all was read afresh"
        assert greedy(llm, prompts) == alone(policy)
        assert external_hits(llm) == 325 + 30 + 128, "the longest state of a file or the pool"
