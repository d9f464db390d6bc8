"""Every way transformers generates, with a bounded cache: the same tokens as the definition, or as the plain model."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import msrnn
from tests.support.oracle import positions_held, slow_attention, slow_greedy, survivors

pytestmark = pytest.mark.usefixtures("one_thread")
POLICIES = ("tova:6", "window+2:6", "h2o:6", "tova-head:6")
CODES = ("tova:6,kv=int8", "h2o:6,kv=k8v4")  # only in float64 is a code surely the definition's
GREEDY = {"max_new_tokens": 20, "do_sample": False}


def some_ids(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def ragged(side: str, lengths: tuple[int, ...] = (3, 11, 7, 16)) -> tuple[list[Tensor], Tensor, Tensor]:
    """Prompts of several lengths, alone and as one padded batch with its mask."""
    alone = [some_ids(length, seed=length) for length in lengths]
    batch, mask = torch.zeros(len(lengths), max(lengths), dtype=torch.int64), torch.zeros(len(lengths), max(lengths))
    for row, ids in enumerate(alone):
        place = slice(0, ids.shape[1]) if side == "right" else slice(-ids.shape[1], None)
        batch[row, place], mask[row, place] = ids[0], 1
    return alone, batch, mask.long()


@pytest.mark.parametrize("policy", [*POLICIES, *CODES])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_greedy(llama, attn: str, policy: str) -> None:
    model, ids = llama(attn).double(), some_ids(14)
    want = slow_greedy(model, policy, ids, 20)
    cache = msrnn.cache(model, policy)
    assert model.generate(ids, past_key_values=cache, **GREEDY).tolist() == want.tolist()
    assert (cache.held, cache.get_seq_length()) == (6, 33)
    assert want.tolist() != model.generate(ids, **GREEDY).tolist(), "the bound is felt"
    if policy in CODES:
        assert want.tolist() != slow_greedy(model, policy.split(",kv=")[0], ids, 20).tolist(), "so are the codes"


@pytest.mark.parametrize("policy", ["tova:5", "h2o:6", "tova-head:5", *CODES])
def test_oneshot_prompt(llama, policy: str) -> None:
    """The prompt under full attention, then down to the capacity, as the paper's released code does."""
    model, ids = llama().double(), some_ids(14)
    want = slow_greedy(model, policy, ids, 20, prompt="oneshot")
    cache = msrnn.cache(model, policy, prompt="oneshot")
    assert model.generate(ids, past_key_values=cache, **GREEDY).tolist() == want.tolist()
    assert want.tolist() != slow_greedy(model, policy, ids, 20).tolist()
    with pytest.raises(ValueError, match="recurrent, oneshot"):
        msrnn.cache(model, policy, prompt="one-shot")


def test_a_residual_takes_no_oneshot_prompt(llama) -> None:
    with pytest.raises(ValueError, match="use prompt='recurrent'"):
        msrnn.cache(llama(), "blend:8", prompt="oneshot")


def test_a_policy_for_every_layer(llama) -> None:
    model, ids, plan = llama().double(), some_ids(14), ["tova:4", "window+1:8", "h2o:6"]
    want = slow_greedy(model, plan, ids, 20)
    cache = msrnn.cache(model, plan)
    assert model.generate(ids, past_key_values=cache, **GREEDY).tolist() == want.tolist()
    assert [int(layer.slots.held.max()) for layer in cache.bounded] == [4, 8, 6]


@pytest.mark.parametrize("sampling", [{}, {"num_return_sequences": 3}, {"top_k": 5, "temperature": 1.5}])
def test_sampling_with_room_for_everything_is_the_plain_model(llama, sampling: dict) -> None:
    model, ids = llama(), some_ids(14)
    options = {"max_new_tokens": 20, "do_sample": True} | sampling
    torch.manual_seed(3)
    plain = model.generate(ids, **options)
    torch.manual_seed(3)
    assert model.generate(ids, past_key_values=msrnn.cache(model, "tova:64"), **options).tolist() == plain.tolist()


def test_several_samples_of_a_bounded_prompt(llama) -> None:
    """Each row of one batched sampling run has the states that its own tokens make."""
    model, ids = llama().double(), some_ids(14)
    cache = msrnn.cache(model, "tova:6")
    torch.manual_seed(3)
    rows = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=True, num_return_sequences=3)
    assert len({tuple(row) for row in rows.tolist()}) == 3
    for row, tokens in enumerate(rows):
        with slow_attention(model, "tova:6") as layers, torch.no_grad():
            model(tokens[None, :-1], use_cache=False)
        for index, state in layers.items():
            assert survivors(cache.layers[index].slots, row) == positions_held(state)


@pytest.mark.parametrize("beams", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_beams_with_room_for_everything_are_the_plain_beams(llama, beams: dict) -> None:
    model, ids = llama(), some_ids(14, rows=2)
    plain = model.generate(ids, **GREEDY, **beams)
    assert (
        model.generate(ids, past_key_values=msrnn.cache(model, "tova:64"), **GREEDY, **beams).tolist() == plain.tolist()
    )


@torch.no_grad()
def replayed_beams(model: LlamaForCausalLM, policy: str, ids: Tensor, new: int, beams: int) -> list[list[int]]:
    """Beam search in which every hypothesis is read from its beginning by the definition: no state is ever shared."""
    found = [(0.0, ids[0].tolist())]
    for _ in range(new):
        grown = []
        for score, tokens in found:
            with slow_attention(model, policy):
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            best = logits.float().log_softmax(-1).topk(beams)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            grown += [(score + more, [*tokens, token]) for more, token in pairs]
        found = sorted(grown, reverse=True)[:beams]
    return [tokens for _, tokens in found]


@pytest.mark.parametrize("policy", ["tova:6", "h2o:6", *CODES])
def test_bounded_beams(llama, policy: str) -> None:
    model, ids = llama().double(), some_ids(10)
    want = replayed_beams(model, policy, ids, new=8, beams=3)
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8, "do_sample": False}
    cache = msrnn.cache(model, policy)
    assert model.generate(ids, past_key_values=cache, **options).tolist() == want
    assert cache.held == 6
    assert want != model.generate(ids, **options).tolist()


@torch.no_grad()
def test_rows_move_with_their_states(llama) -> None:
    """`reorder_cache` and its relatives, as beam search and others call them."""
    model, ids, more = llama().double(), some_ids(20, rows=3), some_ids(8, seed=9, rows=3)
    for change, order in (
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache = msrnn.cache(model, "h2o:6")
        model(ids, past_key_values=cache)
        change(cache)
        assert cache.batch_size == len(order)
        tail = more[torch.arange(len(order)) % 3]
        got = model(tail, past_key_values=cache).logits
        for row, source in enumerate(order):
            single = msrnn.cache(model, "h2o:6")
            model(ids[source : source + 1], past_key_values=single)
            torch.testing.assert_close(got[row], model(tail[row : row + 1], past_key_values=single).logits[0])


def test_streamer(llama, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    model, inputs = llama(), tokenizer("w5 w9 w33 w4 w60 w17 w8 w21", return_tensors="pt", return_token_type_ids=False)
    assert inputs["input_ids"].shape == (1, 8)
    streamer = hf.TextStreamer(tokenizer, skip_prompt=True)
    cache = msrnn.cache(model, "tova:6")
    out = model.generate(**inputs, past_key_values=cache, streamer=streamer, **GREEDY)
    assert capsys.readouterr().out.strip() == tokenizer.decode(out[0, 8:])
    assert cache.held == 6


@pytest.mark.parametrize("policy", ["tova:6", "h2o:6", "tova:99", *CODES, "tova:99,kv=k8v4"])
def test_several_turns_on_one_cache(llama, policy: str) -> None:
    model, text = llama().double(), some_ids(9)
    cache = msrnn.cache(model, policy)
    for turn in range(3):
        once = slow_greedy(model, policy, text, 7)
        real = torch.ones_like(text)  # generate takes a pad token in the text for padding unless told
        text = model.generate(text, attention_mask=real, past_key_values=cache, max_new_tokens=7, do_sample=False)
        assert text.tolist() == once.tolist()
        assert cache.get_seq_length() == text.shape[1] - 1
        text = torch.cat([text, some_ids(5, seed=turn)], 1)


def test_only_the_new_tokens_of_a_turn(llama) -> None:
    """transformers takes them too, if the mask covers the whole text."""
    model, text = llama().double(), some_ids(9)
    cache = msrnn.cache(model, "tova:6")
    text = torch.cat([model.generate(text, past_key_values=cache, **GREEDY), some_ids(5, seed=1)], 1)
    want = slow_greedy(model, "tova:6", text, 20)
    new = text[:, cache.get_seq_length() :]
    got = model.generate(new, attention_mask=torch.ones_like(text), past_key_values=cache, **GREEDY)
    assert got[:, -20:].tolist() == want[:, -20:].tolist()


def test_a_prompt_read_once_and_used_twice(llama) -> None:
    """transformers' own recipe for a shared prompt: deepcopy the cache. The model is not copied with it."""
    model, prompt = llama().double(), some_ids(14)
    cache = msrnn.cache(model, "tova:6")
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    for seed in (1, 2):
        twin = copy.deepcopy(cache)
        assert twin.model is model
        text = torch.cat([prompt, some_ids(4, seed=seed)], 1)
        want = slow_greedy(model, "tova:6", text, 20)
        assert model.generate(text, past_key_values=twin, **GREEDY).tolist() == want.tolist()
    assert cache.get_seq_length() == 14


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_budgets_by_head_are_copied_while_they_decode(llama, copied) -> None:
    """A step leaves tables with addresses of its slots: a copy has slots of its own, and writes only to those."""
    model, text = llama(), some_ids(14)
    plan = msrnn.per_layer("fade", [(5, 9)] * model.config.num_hidden_layers)
    want = model.generate(text, past_key_values=msrnn.cache(model, plan), **GREEDY)
    cache = msrnn.cache(model, plan)
    with torch.no_grad():
        for token in want[:, :16].split(1, 1):
            model(token, past_key_values=cache)
    for one in (copied(cache), cache):
        assert model.generate(want[:, :17], past_key_values=one, **GREEDY | {"max_new_tokens": 17}).equal(want)


def test_reset_begins_again(llama) -> None:
    model, ids = llama(), some_ids(14)
    cache = msrnn.cache(model, "h2o:6")
    first = model.generate(ids, past_key_values=cache, **GREEDY)
    cache.reset()
    assert (cache.held, cache.nbytes, cache.get_seq_length()) == (0, 0, 0)
    assert model.generate(ids, past_key_values=cache, **GREEDY).tolist() == first.tolist()


@pytest.mark.parametrize("size", [1, 4, 5, 100])
def test_prefill_in_pieces(llama, size: int) -> None:
    model, ids = llama().double(), some_ids(14)
    want = slow_greedy(model, "tova:6", ids, 20)
    got = model.generate(ids, past_key_values=msrnn.cache(model, "tova:6"), prefill_chunk_size=size, **GREEDY)
    assert got.tolist() == want.tolist()


def test_embeddings_instead_of_ids(llama) -> None:
    model, ids = llama().double(), some_ids(14)
    want = slow_greedy(model, "tova:6", ids, 20)
    embeds = model.get_input_embeddings()(ids)
    got = model.generate(inputs_embeds=embeds, past_key_values=msrnn.cache(model, "tova:6"), **GREEDY)
    assert got.tolist() == want[:, 14:].tolist()


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 5}])
@pytest.mark.parametrize("policy", [*POLICIES, "tova:99", *CODES])
def test_a_left_padded_batch_is_its_single_runs(llama, policy: str, options: dict) -> None:
    model = llama().double()
    alone, batch, mask = ragged("left")
    cache = msrnn.cache(model, policy)
    got = model.generate(batch, attention_mask=mask, past_key_values=cache, **GREEDY, **options)
    for row, ids in enumerate(alone):
        assert got[row, 16:].tolist() == slow_greedy(model, policy, ids, 20)[0, ids.shape[1] :].tolist()
    seen = [ids.shape[1] + 19 for ids in alone]
    assert all(layer.slots.seen.tolist() == seen for layer in cache.bounded)


@pytest.mark.parametrize("policy", ["tova:5", *CODES])
def test_a_left_padded_batch_with_a_oneshot_prompt(llama, policy: str) -> None:
    model = llama().double()
    alone, batch, mask = ragged("left")
    cache = msrnn.cache(model, policy, prompt="oneshot")
    got = model.generate(batch, attention_mask=mask, past_key_values=cache, **GREEDY)
    for row, ids in enumerate(alone):
        want = slow_greedy(model, policy, ids, 20, prompt="oneshot")
        assert got[row, 16:].tolist() == want[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("piece", [16, 5, 1])
@pytest.mark.parametrize("policy", [*POLICIES, *CODES])
@torch.no_grad()
def test_a_right_padded_batch_is_its_single_runs(llama, policy: str, piece: int) -> None:
    """Plain forwards: the prompt in pieces, the logits at each row's last token, then one token at a time."""
    model = llama().double()
    alone, batch, mask = ragged("right")
    lengths, rows = mask.sum(1), torch.arange(len(alone))
    cache, logits = msrnn.cache(model, policy), []
    for start in range(0, 16, piece):
        end = min(start + piece, 16)
        positions = torch.arange(start, end).expand(len(alone), -1)
        given = {"attention_mask": mask[:, :end], "position_ids": positions, "past_key_values": cache}
        logits.append(model(batch[:, start:end], **given).logits)
    token = torch.cat(logits, 1)[rows, lengths - 1].argmax(-1, keepdim=True)
    text = [token]
    for step in range(19):
        mask = torch.cat([mask, torch.ones_like(token)], 1)
        given = {"attention_mask": mask, "position_ids": (lengths + step)[:, None], "past_key_values": cache}
        token = model(token, **given).logits[:, -1:].argmax(-1)
        text.append(token)
    got = torch.cat(text, 1)
    for row, ids in enumerate(alone):
        assert got[row].tolist() == slow_greedy(model, policy, ids, 20)[0, ids.shape[1] :].tolist()
    assert cache.held <= 6


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.no_grad()
def test_dtypes(llama, dtype: torch.dtype, attn: str) -> None:
    """Rounding alone: with room for everything, no further from float64 than twice the plain model in that dtype."""
    exact, model, ids = llama(attn).double(), llama(attn).to(dtype), some_ids(40)
    want, plain = exact(ids).logits, model(ids).logits
    cache = msrnn.cache(model, "tova:64")
    got = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([20, 1, 1, 18], 1)], 1)
    assert got.dtype == dtype
    assert (got - want).abs().mean() <= 2 * (plain - want).abs().mean()
    for policy in POLICIES:
        cache = msrnn.cache(model, policy)
        out = model.generate(ids, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **GREEDY)
        assert torch.stack(out.logits).isfinite().all()
        assert cache.held == 6
        assert all(layer.slots.keys.dtype == layer.slots.values.dtype == dtype for layer in cache.bounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_blind_policy_rounds_like_the_plain_model(llama, dtype: torch.dtype) -> None:
    """Window decides without weights, so rounding cannot change who leaves, only the logits, and those little."""
    exact, model, ids = llama().double(), llama().to(dtype), some_ids(40)
    with slow_attention(exact, "window+2:6"):
        want = exact(ids, use_cache=False).logits
    got = model(ids, past_key_values=msrnn.cache(model, "window+2:6")).logits
    assert (got - want).abs().mean() <= 2 * (model(ids).logits - exact(ids).logits).abs().mean()


@pytest.mark.parametrize("policy", ["full", "window+4:64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_room_for_everything_is_the_plain_text(llama, dtype: torch.dtype, policy: str) -> None:
    """Where no weights are needed we run the very kernel that sdpa does, so not even bf16 shows a difference."""
    model = llama("sdpa").to(dtype)
    for seed in range(4):
        ids = some_ids(14, seed)
        plain = model.generate(ids, **GREEDY)
        assert model.generate(ids, past_key_values=msrnn.cache(model, policy), **GREEDY).tolist() == plain.tolist()


MAPS = {
    "auto": "auto",
    "one": {"": "cpu"},
    "hooks": {"": "cpu"},
    "parts": {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    | {"model.rotary_emb": "cpu"},
    "disk": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    | {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"},
}


@pytest.mark.parametrize("place", MAPS)
def test_device_map(llama, place: str, tmp_path: Path) -> None:
    model, ids = llama(), some_ids(14)
    model.save_pretrained(tmp_path / "model")
    want = model.generate(ids, past_key_values=msrnn.cache(model, "tova:6"), **GREEDY)
    spread = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=MAPS[place], offload_folder=tmp_path / "disk"
    )
    if place == "hooks":
        spread = accelerate.dispatch_model(spread, {"": "cpu"}, force_hooks=True)
    if place in ("disk", "hooks"):
        assert hasattr(spread.model.layers[1].self_attn, "_hf_hook"), "accelerate moves weights and arguments about"
    cache = msrnn.cache(spread, "tova:6")
    assert spread.generate(ids, past_key_values=cache, **GREEDY).tolist() == want.tolist()
    assert cache.held == 6


@torch.no_grad()
def plain_calls(model: LlamaForCausalLM, attn: str) -> list[Tensor]:
    """The results of calls without our cache, of every kind."""
    ids, (_, batch, mask) = some_ids(14), ragged("left")
    dynamic = hf.DynamicCache(config=model.config)
    return [
        model(ids).logits,
        model(ids, attention_mask=torch.ones(1, 1, 14, 14).tril().bool()).logits,
        *(model(part, past_key_values=dynamic).logits for part in ids.split(5, 1)),
        *(model(ids, output_attentions=True).attentions if attn == "eager" else ()),
        model.generate(ids, **GREEDY),
        model.generate(batch, attention_mask=mask, **GREEDY),
        model.generate(ids, num_beams=3, **GREEDY),
        model.generate(ids, cache_implementation="static", **GREEDY),
        model.generate(ids, use_cache=False, **GREEDY),
        model.generate(ids, prompt_lookup_num_tokens=3, **GREEDY),
    ]


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_plain_calls_are_as_before(llama, attn: str) -> None:
    model = llama(attn)
    before = plain_calls(model, attn)
    cache = msrnn.cache(model, "tova:6")
    model.generate(some_ids(14), past_key_values=cache, **GREEDY)
    after = plain_calls(model, attn)
    assert len(before) == (14 if attn == "eager" else 11)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)


def test_an_attention_that_looks_at_its_own_name(llama) -> None:
    """Flash attention does; its name must be there in calls without our cache, and its results the same."""
    names = []

    def forward(module, *arguments, **options):
        names.append(module.config._attn_implementation)
        return sdpa_attention_forward(module, *arguments, **options)

    hf.AttentionInterface.register("checks_its_name", forward)
    hf.AttentionMaskInterface.register("checks_its_name", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = llama()
    model.set_attn_implementation("checks_its_name")
    before = model.generate(some_ids(14), **GREEDY)
    model.generate(some_ids(14), past_key_values=msrnn.cache(model, "tova:6"), **GREEDY)
    assert torch.equal(model.generate(some_ids(14), **GREEDY), before)
    assert set(names) == {"checks_its_name"}


def test_continuous_batching_is_as_before(llama) -> None:
    model = llama(max_position_embeddings=512)
    prompts = [some_ids(n)[0].tolist() for n in (14, 9)]
    options = hf.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def texts() -> list[list[int]]:
        small = ContinuousBatchingConfig(block_size=16, num_blocks=16, max_batch_tokens=64)
        results = model.generate_batch(prompts, options, small, warmup=False)
        return [results[name].generated_tokens for name in sorted(results)]

    before = texts()
    model.generate(some_ids(14), past_key_values=msrnn.cache(model, "tova:6"), **GREEDY)
    assert texts() == before
    assert all(len(tokens) == 6 for tokens in before)


def test_saving_a_model_does_not_save_the_switch(llama, tmp_path: Path) -> None:
    model = llama()
    msrnn.cache(model, "tova:6")
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    assert "msrnn" not in (tmp_path / "config.json").read_text()
    assert "msrnn" not in json.dumps(model.config.to_dict()) + model.config.to_json_string(use_diff=False)
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


IMPORT = """
import sys, torch, transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions
from transformers.models.llama import modeling_llama

def things():
    homes = [modeling_llama, transformers.cache_utils, transformers.masking_utils, transformers.modeling_utils,
             transformers.generation.utils, torch.nn.functional, torch.Tensor]
    homes += [kind for home in homes for kind in vars(home).values() if isinstance(kind, type)]
    return {(repr(home), name): id(thing) for home in homes for name, thing in list(vars(home).items())
            if callable(thing) and not name.startswith("_abc")}

registries = [dict(r._global_mapping) for r in (attentions, masks)]
before = things()
import msrnn
assert [dict(r._global_mapping) for r in (attentions, masks)] == registries, "a registry changed on import"

def changes():
    after = things()
    changed = [name for name in before if after.get(name) != before[name]]
    return [name for name in changed if "cached_value" not in name[1]]

assert not changes(), changes()
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2)
model, other = (transformers.LlamaForCausalLM(c).eval() for c in (config, transformers.LlamaConfig(**config.to_dict())))
assert model.config._attn_implementation == "sdpa"
model.generate(torch.ones(1, 3, dtype=torch.long), past_key_values=msrnn.cache(model, "tova:2"), max_new_tokens=4)
for registry, old in zip((attentions, masks), registries):
    assert {k: v for k, v in registry._global_mapping.items() if not k.startswith("msrnn")} == old
# one check, put there by cache(): without it continuous batching would drop a bounded cache and run unbounded
assert {name for _, name in changes()} <= {"generate_batch"}, changes()
assert transformers.GenerationMixin.generate_batch.refuses_bounded_caches
assert other.config._attn_implementation == "sdpa", "another model was switched"
"""


@pytest.mark.slow
def test_importing_patches_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
