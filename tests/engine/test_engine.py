"""The engine against transformers' own generate with a bounded cache: the same tokens, whatever the batch around."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.engine.engine import Engine, EngineOptions, Request
from msrnn.engine.sampling import pick, uniform

POLICIES = (
    "tova:8", "tova+2:8,last=1", "tova-head:8", "tova-query-head:8", "window:8", "window+2:8", "h2o:8", "h2o-layer:8",
    "tova:8,momentum=0.5", "tova:8,gain=value_norm", "h2o:8,gain=value_norm", "key_difference:8", "tova:8,kv=int8",
    "h2o:8,kv=k8v4", "blend:8", "blend:8,kv=k8v4", "tova-query-head:8,kv=int8", "tova:200", "full",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts(*sizes: int, vocabulary: int = 64) -> list[list[int]]:
    random = torch.Generator().manual_seed(sum(sizes))
    return [torch.randint(2, vocabulary, (size,), generator=random).tolist() for size in sizes]


def generate(model: PreTrainedModel, policy: str, prompt: list[int], new: int, **settings: object) -> list[int]:
    """What transformers writes after one prompt alone."""
    cache = msrnn.cache(model, policy)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, do_sample=False, **settings
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_same_tokens_as_generate(llama, policy):
    model = llama().double() if "kv=" in policy else llama()  # a rounding in float32 may change a code
    texts = prompts(30, 3, 17, 1, 9)
    engine = Engine(model, policy, batch=2, length=64)  # five requests through two rows: three replacements
    assert engine.generate(texts, max_new_tokens=12) == [generate(model, policy, text, 12) for text in texts]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", ["tova:8", "tova:8,kv=int8", "h2o:8,kv=k8v4"])
def test_same_tokens_in_16_bits(llama, policy, dtype):
    """Three requests through one row, whose matmuls are rounded as those of a single run; those of two rows are not."""
    model, texts = llama().to(dtype), prompts(30, 3, 17)
    engine = Engine(model, policy, batch=1, length=64)
    assert engine.generate(texts, max_new_tokens=12) == [generate(model, policy, text, 12) for text in texts]


@pytest.mark.parametrize("policy", ["tova:8", "h2o:8", "full"])
def test_a_batch_equals_its_single_runs(llama, policy):
    model, texts = llama(), prompts(20, 5, 11, 26)
    alone = [Engine(model, policy, batch=1, length=64).generate([text], max_new_tokens=9)[0] for text in texts]
    assert Engine(model, policy, batch=4, length=64).generate(texts, max_new_tokens=9) == alone


def test_long_prompts_are_read_in_pieces(llama):
    model, texts = llama(), prompts(70, 20)
    engine = Engine(model, "tova:8", batch=2, options=EngineOptions(chunk=7, piece=16))
    assert engine.generate(texts, max_new_tokens=6) == [generate(model, "tova:8", text, 6) for text in texts]


def test_a_long_prompt_alone_is_pipelined(llama, monkeypatch):
    model, texts = llama(), prompts(80, 5)
    engine = Engine(model, "tova:8", batch=1, options=EngineOptions(chunk=6, pipelined_prefill=True))
    engine.pipeline.lanes = 4
    rounds, reported, whole = [], [], engine.pipeline._round
    monkeypatch.setattr(engine.pipeline, "_round", lambda size, *rest: rounds.append(size) or whole(size, *rest))
    want = [generate(model, "tova:8", text, 6) for text in texts]
    assert engine.generate(texts, max_new_tokens=6, on_read=reported.append) == want
    assert rounds == [8, 4]
    assert reported == [8, 48, 24, 5]


def test_a_few_long_prompts_are_pipelined_one_by_one(llama, monkeypatch):
    model, texts = llama(), prompts(60, 20, 70)
    want = [generate(model, "tova:8", text, 6) for text in texts]
    engine = Engine(model, "tova:8", batch=2, options=EngineOptions(chunk=6, pipelined_prefill=True))
    engine.pipeline.lanes = 4
    lengths, whole = [], engine.pipeline.read
    monkeypatch.setattr(engine.pipeline, "read", lambda ids, report: lengths.append(ids.shape[1]) or whole(ids, report))
    assert engine.generate(texts, max_new_tokens=6) == want
    assert lengths == [60, 70]
    new = [engine._job(i, Request(text)) for i, text in enumerate(texts)]
    assert engine._groups(new) == [new]  # of three at once, none


def test_which_prompts_are_pipelined(llama):
    model = llama()
    assert Engine(model, "tova:8").pipeline is None  # on a CPU only on request
    assert Engine(model, "full", length=64, options=EngineOptions(pipelined_prefill=True)).pipeline is None
    engine = Engine(model, "tova:8", options=EngineOptions(pipelined_prefill=True, chunk=6))
    engine.pipeline.lanes = 7
    assert engine._in_pipeline(50)
    assert not engine._in_pipeline(49)
    engine._long = 100  # as on a GPU, where a graph must be captured first
    assert not engine._in_pipeline(99)
    assert engine._in_pipeline(100)


def test_each_request_reports_how_much_of_its_prompt_is_read(llama):
    reported = {20: [], 7: [], 13: []}
    engine = Engine(llama(), "tova:8", batch=3, options=EngineOptions(piece=8))
    list(engine.run(Request(p, max_new_tokens=1, on_read=reported[len(p)].append) for p in prompts(20, 7, 13)))
    assert reported == {20: [8, 8, 4], 7: [3, 4], 13: [1, 8, 4]}


def test_one_policy_per_layer(llama):
    model, texts = llama(), prompts(30, 12)
    plan = ["tova:6", "full", "h2o:9"]
    tokens = Engine(model, plan, batch=2, length=64).generate(texts, max_new_tokens=8)
    assert tokens == [generate(model, plan, text, 8) for text in texts]


def test_models_with_a_sliding_window(llama):
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": None}
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=10)).eval()
    texts = prompts(30, 4, 14)
    for policy in ("tova:6", "full"):
        tokens = Engine(model, policy, batch=2, length=64).generate(texts, max_new_tokens=12)
        assert tokens == [generate(model, policy, text, 12) for text in texts]


def test_ends_at_a_stop_or_at_the_limit(llama):
    model, (text,) = llama(), prompts(12)
    free = Engine(model, "tova:8", batch=1).generate([text], max_new_tokens=20)[0]
    stop = free[5]
    cut = free[: free.index(stop) + 1]
    engine = Engine(model, "tova:8", batch=2)
    requests = [
        Request(text, max_new_tokens=20, stops=[stop]),
        Request(text, max_new_tokens=1),
        Request(text, max_new_tokens=20, stops=[free[0]]),
        Request(text, max_new_tokens=3),
    ]
    done = {each.index: each for each in engine.run(requests)}
    assert [done[i].tokens for i in range(4)] == [cut, free[:1], free[:1], free[:3]]
    assert [done[i].reason for i in range(4)] == ["stop", "length", "stop", "length"]
    model.generation_config.eos_token_id = [stop]
    assert engine.generate([text], max_new_tokens=20) == [cut]


def test_tokens_are_streamed(llama):
    engine, streamed = Engine(llama(), "tova:8", batch=1), []
    running = engine.run([Request(prompts(9)[0], max_new_tokens=4, on_token=streamed.append)])
    assert next(running).tokens == streamed
    assert len(streamed) == 4


def test_requests_are_taken_as_rows_become_free(llama):
    taken = []

    def endless() -> Iterator[Request]:
        for size in range(1, 1000):
            taken.append(size)
            yield Request(prompts(3)[0], max_new_tokens=size % 3 + 1)

    running = Engine(llama(), "window:8", batch=2).run(endless())
    for _ in range(4):
        next(running)
    assert len(taken) < 10


def test_sampling_depends_on_the_seed_alone(llama):
    model, (one, other) = llama(), prompts(10, 15)
    settings = {"max_new_tokens": 10, "temperature": 1.5, "top_p": 0.9}
    engine = Engine(model, "tova:8", batch=3)
    alone = engine.generate([one], seed=7, **settings)[0]
    requests = [Request(one, seed=s, **settings) for s in (7, 8)] + [Request(other, max_new_tokens=10)]
    done = {each.index: each.tokens for each in engine.run(requests)}
    assert done[0] == alone != done[1]
    assert done[2] == generate(model, "tova:8", other, 10)  # greedy among rows that sample


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5]).expand(20_000, -1)
    heat, top_p = torch.full((20_000,), 0.8), torch.full((20_000,), 0.85)
    all_of_them, seed = torch.zeros(20_000, dtype=torch.int64), torch.full((20_000,), 3)
    drawn = pick(logits, heat, all_of_them, top_p, seed, torch.arange(20_000))
    share = (logits[0] / 0.8).softmax(0)
    kept = share * torch.tensor([0, 1, 1, 0, 1])  # 0.48, 0.26 and 0.14: the first three reach 0.85
    found = drawn.bincount(minlength=5) / 20_000
    assert torch.allclose(found, kept / kept.sum(), atol=0.015)
    assert found[0] == found[3] == 0


def test_top_k_comes_before_top_p():
    """As in transformers: `top_p` is a share of what `top_k` leaves."""
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5]).expand(20_000, -1)
    count = torch.arange(20_000)
    top_k, top_p = torch.where(count < 10_000, 3, 2), torch.where(count < 10_000, 1.0, 0.6)
    drawn = pick(logits, torch.ones(20_000), top_k, top_p, torch.full((20_000,), 3), count)
    share = logits[0].softmax(0)
    found = drawn[:10_000].bincount(minlength=5) / 10_000
    three = share * torch.tensor([0, 1, 1, 0, 1])
    assert torch.allclose(found, three / three.sum(), atol=0.02)
    assert found[0] == found[3] == 0
    assert drawn[10_000:].unique().tolist() == [1]  # 0.62 of the two likeliest: enough by itself


def test_random_numbers_are_even_and_unrelated():
    numbers = torch.stack([uniform(torch.full((5000,), seed), torch.arange(5000)) for seed in range(4)])
    assert 0 <= float(numbers.min()) < float(numbers.max()) < 1
    assert torch.allclose(numbers.mean(1), torch.tensor(0.5), atol=0.02)
    assert torch.corrcoef(numbers).fill_diagonal_(0).abs().max() < 0.05
    assert torch.corrcoef(torch.stack([numbers[0, 1:], numbers[0, :-1]]))[0, 1].abs() < 0.05


@pytest.mark.parametrize("policy", ["tova:8", "full"])
def test_steps_while_all_rows_are_idle_change_nothing(llama, policy):
    """As during the capture of a CUDA graph, which may happen while rows are being generated."""
    model, texts = llama(), prompts(20, 6, 13)
    engine = Engine(model, policy, batch=2, length=48)
    plain = engine.step

    def disturbed(sampled: bool) -> None:
        with engine.cache.idle():
            plain(True)
            plain(False)
        plain(sampled)

    engine.step = disturbed
    assert engine.generate(texts, max_new_tokens=8) == [generate(model, policy, text, 8) for text in texts]


@pytest.mark.parametrize("backend", ["masked", "step"])
def test_every_backend_for_full_attention(llama, backend):
    model, texts = llama(), prompts(20, 6, 13)
    engine = Engine(model, "full", batch=2, length=48, options=EngineOptions(full_attention=backend))
    assert engine.generate(texts, max_new_tokens=8) == [generate(model, "full", text, 8) for text in texts]


def test_the_exact_backend_is_right_while_every_slot_is_filled(llama):
    model, (text,) = llama(), prompts(20)
    want = generate(model, "full", text, 2)
    engine = Engine(model, "full", batch=1, length=21, options=EngineOptions(full_attention="exact"))
    assert engine.generate([text], max_new_tokens=2)[0] == want


def test_soft_caps_and_a_full_cache(llama):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": None}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**shape, **heads, sliding_window=12, attn_logit_softcapping=2.0)).eval()
    texts = prompts(20, 7)
    for policy in ("tova:9", "full"):
        tokens = Engine(model, policy, batch=2, length=40).generate(texts, max_new_tokens=8)
        assert tokens == [generate(model, policy, text, 8) for text in texts]


@pytest.mark.slow
def test_a_compiled_engine_writes_the_same_tokens(llama, monkeypatch):
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **more: whole(*args, backend="eager", **more))
    model, texts = llama(num_hidden_layers=1), prompts(20, 6)
    engine = Engine(model, "tova:8", batch=2, options=EngineOptions(compile=True))
    assert engine.generate(texts, max_new_tokens=4) == [generate(model, "tova:8", text, 4) for text in texts]


def test_the_model_still_runs_by_itself(llama):
    model, (text,) = llama(), prompts(12)
    want = model.generate(torch.tensor([text]), max_new_tokens=6, do_sample=False)
    Engine(model, "tova:4", batch=2).generate([text], max_new_tokens=6)
    assert torch.equal(model.generate(torch.tensor([text]), max_new_tokens=6, do_sample=False), want)


def test_memory_is_that_of_the_capacity(llama):
    model = llama()
    small, large = (Engine(model, "tova:8", batch=batch).cache.nbytes for batch in (1, 5))
    assert large == 5 * small
    assert Engine(model, "full", batch=1, length=90).cache.nbytes == 3 * 90 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda m: Engine(m, "tova:8", batch=0), "batch is 0"),
        (lambda m: Engine(m, "tova:8", options=EngineOptions(cuda_graphs=True)), "need a GPU"),
        (lambda m: Request([]), "prompt is empty"),
        (lambda m: Request([1], max_new_tokens=0), "max_new_tokens is 0"),
        (lambda m: Request([1], temperature=-1), "temperature is -1"),
        (lambda m: Request([1], top_p=0), "top_p is 0"),
        (lambda m: Request("Once upon a time"), "a prompt is a list of token ids, not 'Once upon a time'"),
        (lambda m: Request("a" * 5000), r"not 'a+\.\.\.a+'; e.g. tokenizer"),
        (lambda m: Request(["a", "b"]), r"a prompt is a list of token ids, not \['a', 'b'\]"),
        (lambda m: Request([1.5]), r"a prompt is a list of token ids, not \[1.5\]"),
        (lambda m: Request(None), "a prompt is a list of token ids, not None"),
        (lambda m: Engine(m, "tova:6").generate([1, 2]), "a prompt is a list of token ids, not 1"),
        (
            lambda m: Engine(m, "tova:6").generate(torch.tensor([1, 2])),
            r"a prompt is a list of token ids, not tensor\(1\)",
        ),
        (lambda m: Request([1], top_k=0), "top_k is 0"),
        (lambda m: Engine(m, "tova:8", options=EngineOptions(chunk=0)), "chunk is 0"),
        (lambda m: Request([1], seed=-1), "seed is -1"),
        (lambda m: Request([1], stops=range(17)), "17 end tokens"),
        (lambda m: Engine(m, "tova:8").generate([[64]]), "the model knows 0 to 63"),
        (lambda m: Engine(m, "full:kv=int8", length=20), "full:kv=int8 is not for batches: give a capacity"),
        (lambda m: Engine(m, "full", length=20).generate([[1] * 15], max_new_tokens=10), "room for 20"),
    ],
)
def test_what_cannot_be_run_is_refused(llama, make, says):
    with pytest.raises(ValueError, match=says):
        make(llama())


def test_all_prompts_are_checked_before_any_is_read(llama):
    engine, tokens = Engine(llama(), "tova:8", batch=1), []
    with pytest.raises(ValueError, match="request 2: token ids run from 3 to 64"):
        engine.generate([[5], [6], [3, 64]], max_new_tokens=3, on_token=tokens.append)
    assert tokens == []
    assert len(engine.generate([[5], [6]], max_new_tokens=3, on_token=tokens.append)) == 2
    assert len(tokens) == 6


def test_more_end_tokens_of_the_model_than_the_engine_takes(llama):
    model, (text,) = llama(), prompts(12)
    model.generation_config.eos_token_id = list(range(17))
    engine = Engine(model, "tova:8", batch=1)
    with pytest.raises(ValueError, match=r"generation config has 17 end tokens; the engine takes 16 at most"):
        engine.generate([text], max_new_tokens=3)
    assert len(engine.generate([text], max_new_tokens=3, stops=[])[0]) == 3
    model.generation_config.eos_token_id = list(range(48, 64))
    assert engine.generate([text], max_new_tokens=3)


@pytest.mark.slow
def test_the_bundled_model():
    policy = "tova:24"
    model, tokenizer = msrnn.load(dtype="float32")
    texts = [tokenizer(t).input_ids for t in ("The three primary colours are red,", "Once upon a time " * 8)]
    tokens = Engine(model, policy, batch=2, length=64).generate(texts, max_new_tokens=8)
    assert tokens == [generate(model, policy, text, 8) for text in texts]
