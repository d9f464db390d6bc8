"""A long prompt in pieces, each its own pass through the model: the tokens are those of one pass.

On a GPU pieces run beside each other (`benchmarks/vllm_agrees.py`); here they run in turn, through the same code.
"""

import os

import pytest

from msrnn.vllm import lanes
from msrnn.vllm.lane_count import WORKER
from tests.in_vllm.engines import TRACED, engine, greedy, in_turn


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """The number of pieces of every batch that has some."""
    counts: list[int] = []
    run = lanes.Streams.run

    def count(self, calls):
        counts.append(len(calls))
        return run(self, calls)

    monkeypatch.setattr(lanes.Streams, "run", count)
    monkeypatch.setattr(lanes, "PIECE", 64)
    return counts


@pytest.mark.parametrize("policy", ["tova:64", "h2o:64"])
def test_pieces_give_the_tokens_of_one_pass(model, prompts, alone, passes, policy):
    with engine(model, policy, worker_cls=WORKER) as llm:
        assert [greedy(llm, [ids])[0] for ids in prompts] == alone(policy)
        assert passes == [3, 6], "130 and 330 tokens; the others are one piece"


def test_a_long_prompt_beside_requests_that_decode(model, prompts, alone, passes):
    """The steps of the others go with the first piece."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    order, tokens = [0, 1, 4], {}
    with engine(model, "tova:64", worker_cls=WORKER) as llm:
        for number in order:
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompts[number]}, sampling)
            for answer in llm.llm_engine.step():
                tokens[answer.request_id] = list(answer.outputs[0].token_ids)
        while llm.llm_engine.has_unfinished_requests():
            for answer in llm.llm_engine.step():
                tokens[answer.request_id] = list(answer.outputs[0].token_ids)
    assert passes == [6]
    assert [tokens[str(number)] for number in order] == [alone("tova:64")[number] for number in order]


def test_layers_of_several_kinds_are_read_in_one_pass(model, prompts, passes):
    with engine(model, in_turn("tova:64", "h2o:48"), worker_cls=WORKER) as llm:
        greedy(llm, prompts[-1:], 1)
    assert not passes


def test_pieces_where_processes_split_the_layers(model, hf_model, prompts, monkeypatch):
    """What a stage passes on is cut and joined by token."""
    import torch

    import msrnn

    ids = (prompts[-1] * 4)[:1200]
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    options = {"pipeline_parallel_size": 2, "worker_cls": WORKER, "max_model_len": 2048, **TRACED}
    with engine(model, "tova:64", max_num_batched_tokens=2048, **options) as llm:
        tokens = greedy(llm, [ids])[0]
    rnn = msrnn.RNN(hf_model, "tova:64")
    logits, state = rnn.read(ids, rnn.start())
    for token in tokens:
        assert int(logits.argmax()) == token
        logits, state = rnn.step(torch.tensor([[token]]), state)
