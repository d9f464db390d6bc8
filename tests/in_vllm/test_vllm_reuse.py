"""Requests start from the states that earlier ones left in the pool, and answer as if they had read all afresh."""

import os

import pytest

from msrnn.vllm import lanes
from msrnn.vllm.lane_count import WORKER
from msrnn.vllm.pool import SCHEDULER
from tests.in_vllm.engines import TRACED, build_prefix, connector, engine, external_hits, greedy, in_turn

EVERY = 32
PIECES = {"max_num_batched_tokens": 96, "scheduler_cls": SCHEDULER}


def pool(states: int, files: dict[str, str] | None = None) -> dict:
    """vLLM's options for a pool, as `msrnn serve --prefix-pool` passes them."""
    return {"kv_transfer_config": connector(files or {}, states=states, every=EVERY), **PIECES}


def index(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.index


@pytest.fixture(scope="session")
def ids(model) -> list[int]:
    from pathlib import Path

    from transformers import AutoTokenizer

    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return AutoTokenizer.from_pretrained(model)(" ".join(text.split()))["input_ids"]


@pytest.fixture(scope="session")
def prompts(ids) -> list[list[int]]:
    """Two texts, each going on in several ways: within the capacity of 64, beyond it, by one token."""
    one, two = ids[:200], ids[400:450]
    tails = ids[800:840], ids[900:901], ids[1000:1100]
    return [text + tail for text in (one, two) for tail in tails] + [one[:33], one[:32], one[:100]]


def ask(llm, prompt: dict, **options) -> list[int]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, **options)
    (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


MIXED = in_turn("h2o:64,gain=value_norm", "fade:20|fade:64|fade:108")


@pytest.mark.parametrize("policy", ["tova:64", MIXED], ids=["tova", "gains and budgets by head"])
def test_answers_equal_reading_afresh(model, prompts, policy):
    """First alone, one after the other, so that each finds what those before it left; then all at once."""
    with engine(model, policy, **pool(64)) as llm:
        alone = [greedy(llm, [prompt])[0] for prompt in prompts]
        # 192 tokens of the first text for the second and third prompt, and so on; 32 of 33, and none of 32
        assert external_hits(llm) == 2 * 192 + 2 * 32 + 32 + 0 + 96
        whole = [ask(llm, {"prompt_token_ids": prompt}, skip_reading_prefix_cache=True) for prompt in prompts]
        assert external_hits(llm) == 2 * 192 + 2 * 32 + 32 + 0 + 96, "nothing was reused for these"
        assert alone == whole
        assert greedy(llm, prompts) == whole
        assert greedy(llm, prompts[::-1]) == whole[::-1], "states in the pool are not changed by use"
        assert index(llm).evictions == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_a_long_prompt_alone_is_not_cut_and_keeps_the_same_states(
    model, prompts, monkeypatch, pieces, afresh, processes
):
    """With the worker that reads it in pieces, and where processes split the layers: states are kept between pieces."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, (cores * 2)[:processes])))
    options = pool(64) | {"max_num_batched_tokens": 1024, "worker_cls": WORKER}
    options |= {"pipeline_parallel_size": 2, **TRACED} if processes > 1 else {}
    with engine(model, "tova:64", **options) as llm:
        alone = [greedy(llm, [prompt])[0] for prompt in prompts]
        assert external_hits(llm) == 2 * 192 + 2 * 32 + 32 + 0 + 96
        assert alone == afresh[: len(prompts)]
        if processes == 1:
            assert pieces[:2] == [8, 4], "240 tokens with states at 32, 64 ... 224, and the last 108 of 300"
        assert greedy(llm, prompts) == alone, "together, from what is in the pool"


def test_a_batch_that_is_not_read_in_pieces_stops_the_server(model, prompts, monkeypatch):
    """A state that the scheduler counts on and nobody has kept would be another text's."""
    from msrnn.vllm import worker

    monkeypatch.setattr(worker, "_pieces", lambda *arguments: [])
    with engine(model, "tova:64", **pool(64) | {"max_num_batched_tokens": 1024, "worker_cls": WORKER}) as llm:
        assert greedy(llm, [prompts[-1][:30]])
        with pytest.raises(RuntimeError, match="--prefix-pool 0"):
            greedy(llm, [prompts[0]])


def test_a_new_prompt_of_one_token_beside_a_long_one(model, prompts, afresh):
    """With vLLM's own scheduler the long one's piece ends anywhere, and the other is behind it: none is alone."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    options = pool(64) | {"worker_cls": WORKER, "long_prefill_token_threshold": 80}
    del options["scheduler_cls"]
    with engine(model, "tova:64", **options) as own:
        llm, tokens = own.llm_engine, {}
        llm.add_request("long", {"prompt_token_ids": prompts[2]}, sampling)
        llm.step()
        llm.add_request("one", {"prompt_token_ids": prompts[0][:1]}, sampling)
        while llm.has_unfinished_requests():
            for answer in llm.step():
                tokens[answer.request_id.partition("-")[0]] = list(answer.outputs[0].token_ids)
        assert tokens["long"] == afresh[2]
        assert greedy(own, [prompts[2]]) == [afresh[2]]
        assert external_hits(own) > 0


@pytest.fixture
def pieces(monkeypatch) -> list[int]:
    """The number of pieces of every batch that has some."""
    counts: list[int] = []
    run = lanes.Streams.run
    monkeypatch.setattr(lanes.Streams, "run", lambda self, calls: counts.append(len(calls)) or run(self, calls))
    return counts


@pytest.fixture(scope="module")
def afresh(model, prompts, ids):
    """What each prompt, and one that begins with the prefix file, is answered without pool and files."""
    with engine(model, "tova:64") as llm:
        return greedy(llm, [*prompts, ids[1200:1300]])


@pytest.mark.parametrize("states", [16, 0], ids=["pool", "prefix files alone"])
def test_requests_preempted_while_a_batch_is_on_its_way(
    model, hf_model, prompts, ids, afresh, monkeypatch, tmp_path, states
):
    """As on a GPU, where vLLM schedules ahead: it gets back all blocks at once, though a batch still uses them.

    Before `small` starts: vLLM has one KV connector in a process.
    """
    from vllm import SamplingParams
    from vllm.config import VllmConfig

    monkeypatch.setattr(VllmConfig, "max_concurrent_batches", 2)
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    files = {} if states else {"file": build_prefix(hf_model, model, tmp_path, "file", ids[:50], "tova:64")}
    with engine(model, "tova:64", **pool(states, files)) as small:
        llm, tokens, turn = small.llm_engine, {}, 0
        assert llm.engine_core.engine_core.scheduler.need_mamba_block_aligned_split == (states > 0), "who cuts prompts"
        for name, prompt in enumerate(prompts):
            llm.add_request(str(name), {"prompt_token_ids": prompt}, sampling)
        while llm.has_unfinished_requests():
            for answer in llm.step():
                tokens[int(answer.request_id.partition("-")[0])] = list(answer.outputs[0].token_ids)
            turn += 1
            if turn in (3, 8, 15):
                assert llm.reset_prefix_cache(reset_running_requests=True)
        assert turn > 15
        assert external_hits(small) > 0
        assert [tokens[name] for name in range(len(prompts))] == afresh[: len(prompts)]


@pytest.fixture(scope="module")
def small(model, hf_model, ids, tmp_path_factory, afresh):
    """An engine whose pool has four places, and a prefix file; started after the other one has ended."""
    folder = tmp_path_factory.mktemp("prefix")
    files = {"file": build_prefix(hf_model, model, folder, "file", ids[1200:1250], "tova:64")}
    with engine(model, "tova:64", **pool(4, files)) as llm:
        yield llm


def test_a_full_pool_evicts_and_answers_stay_the_same(small, prompts, ids, afresh):
    texts = [*prompts, ids[1200:1300]]
    before = external_hits(small)
    for _ in range(2):
        assert [greedy(small, [text])[0] for text in texts] == afresh
    assert greedy(small, texts) == afresh, "all at once"
    assert len(index(small)) == 4
    assert index(small).evictions > 4
    assert external_hits(small) > before + 2 * 50, "at least those of the prefix file"


def test_requests_with_another_salt_share_nothing(small, prompts, afresh):
    salted = [{"prompt_token_ids": prompts[2], "cache_salt": salt} for salt in ("a", "a", "b")]
    hits = []
    for prompt in salted:
        before = external_hits(small)
        assert ask(small, prompt) == afresh[2]
        hits.append(external_hits(small) - before)
    assert hits == [0, 288, 0], "prompt 2 has 300 tokens"


def test_prompt_logprobs_need_the_whole_prompt(small, prompts, afresh):
    prompt = {"prompt_token_ids": prompts[2]}
    for _ in range(2):
        before = external_hits(small)
        assert ask(small, prompt, prompt_logprobs=1) == afresh[2]
        assert external_hits(small) == before
    assert ask(small, prompt) == afresh[2]
    assert external_hits(small) == before + 288


def test_aborted_and_preempted_requests(small, prompts, afresh):
    """What they left in the pool is right, and a preempted request starts from it."""
    from vllm import SamplingParams

    llm = small.llm_engine
    llm.reset_prefix_cache(reset_connector=True)
    assert len(index(small)) == 0
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    names = ["aborted", "one", "two"]
    for name, prompt in zip(names, (prompts[2], prompts[0], prompts[3]), strict=True):
        llm.add_request(name, {"prompt_token_ids": prompt}, sampling)
    tokens, turn = {}, 0
    while llm.has_unfinished_requests():
        for answer in llm.step():
            tokens[answer.request_id.partition("-")[0]] = list(answer.outputs[0].token_ids)
        turn += 1
        if turn == 2:
            llm.abort_request(names[:1])
        if turn in (3, 8):
            assert llm.reset_prefix_cache(reset_running_requests=True)
    assert turn > 8
    assert [tokens[name] for name in names[1:]] == [afresh[0], afresh[3]]
    assert ask(small, {"prompt_token_ids": prompts[2]}) == afresh[2]


def test_embeddings_within_a_chat_share_nothing(small, ids):
    """vLLM has tokens for them too, the same for all; neither the pool nor a file may take them for the text."""
    import torch
    from vllm import SamplingParams
    from vllm.v1.request import Request

    def request(name: str, **embeddings) -> Request:
        return Request(name, ids[1200:1300], SamplingParams(max_tokens=1), None, **embeddings)

    connector = small.llm_engine.engine_core.engine_core.scheduler.connector
    text = request("text")
    assert len(connector.keys_of(text)) == 3
    assert connector.find(text).name == "file"
    is_text = [not 10 <= place < 20 for place in range(100)]
    for value in (0.0, 1.0):
        mixed = request(f"of {value}", prompt_embeds=torch.full((100, 4), value), prompt_is_token_ids=is_text)
        assert connector.keys_of(mixed) == []
        assert connector.find(mixed) is None
        assert connector.get_num_new_matched_tokens(mixed, 0) == (0, False)


def test_requests_that_began_before_a_reset_leave_no_states(small, prompts, afresh):
    """The weights may be others since; those that begin anew, preempted ones among them, leave theirs."""
    from vllm import SamplingParams

    llm = small.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for preempted in (False, True):
        llm.reset_prefix_cache(reset_connector=True)
        llm.add_request("old", {"prompt_token_ids": prompts[2]}, sampling)
        llm.step()
        assert len(index(small)) == 1, "a piece of the prompt has been read"
        llm.reset_prefix_cache(reset_running_requests=preempted, reset_connector=True)
        assert len(index(small)) == 0
        while llm.has_unfinished_requests():
            answers = llm.step()
            assert preempted or len(index(small)) == 0
        assert list(answers[0].outputs[0].token_ids) == afresh[2]
        assert (len(index(small)) > 0) == preempted
    assert ask(small, {"prompt_token_ids": prompts[0]}) == afresh[0]
    assert len(index(small)) > 0
