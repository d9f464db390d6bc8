"""Static rows, each step written in place: against the recurrence one token at a time, and against plain attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

import msrnn
from msrnn.core import recurrence
from msrnn.core.attention import Attention
from msrnn.core.slots import Slots
from msrnn.engine.static_cache import FullLayer, StaticCache, StaticLayer
from msrnn.hf.attention import BoundIgnored
from msrnn.hf.geometry import Unsupported
from msrnn.policy import parse_policy

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, KV_HEADS, SIZE = 4, 2, 8
ATTENTION = Attention(0.4)
BOUNDED = ("tova:5", "h2o:5", "window+1:5", "tova-query-head:5", "tova:5,gain=value_norm", "h2o:5,gain=value_norm",
           "tova:5,kv=int8", "h2o:5,kv=k8v4,gain=value_norm")  # fmt: skip
TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 0.02, torch.float16: 2e-3}  # a rounding of outputs up to 4


def random_tokens(batch: int, length: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """query [B, H, T, D], key and value [B, G, T, D]."""
    random = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(batch, n, length, SIZE, generator=random, dtype=torch.float64).to(dtype) for n in heads]


def empty_slots(text: str, batch: int = 1, dtype: torch.dtype = torch.float64) -> Slots:
    _, key, value = random_tokens(batch, 1, dtype=dtype)
    return Slots.empty(parse_policy(text), key, value, HEADS)


def take(layer: StaticLayer, query: Tensor, key: Tensor, value: Tensor, attention: Attention = ATTENTION) -> Tensor:
    """One token of every row, as transformers calls a cache and then its attention."""
    layer.update(key, value)
    layer.check_tokens(query)
    return layer.attend(query, attention, None)


def read_separately(
    text: str, lengths: list[int], dtype: torch.dtype = torch.float64
) -> list[tuple[Slots, list[Tensor]]]:
    """Prompts of these lengths, one at a time: their slots and their tokens."""
    prompts = [random_tokens(1, length, seed=length, dtype=dtype) for length in lengths]
    states = [empty_slots(text, dtype=dtype) for _ in prompts]
    for slots, prompt in zip(states, prompts, strict=True):
        recurrence.read(slots, *prompt, parse_policy(text), ATTENTION)
    return list(zip(states, prompts, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("text", BOUNDED)
def test_rows_continue_the_slots_that_were_loaded(text, dtype):
    """Rows 2 and 0 go on from prompts of their own, row 1 is idle."""
    policy, seen = parse_policy(text), torch.full((3,), -1)
    layer = StaticLayer.bounded(policy, empty_slots(text, dtype=dtype), seen)
    prompts = read_separately(text, [9, 3], dtype)
    for row, (slots, _) in zip((2, 0), prompts, strict=True):
        layer.load(torch.tensor([row]), slots)
        seen[row] = slots.seen[0]
    idle = layer.slots.keys[1].clone()
    for step in range(4):
        tokens = random_tokens(3, 1, seed=100 + step, dtype=dtype)
        outputs = take(layer, *tokens)
        for row, (slots, _) in zip((2, 0), prompts, strict=True):
            expected = recurrence.read(slots, *(tensor[row : row + 1] for tensor in tokens), policy, ATTENTION)
            assert torch.allclose(outputs[row], expected[0], atol=TOLERANCE[dtype])
            for name in {"keys", "values", "scales", "positions", "next"} & set(slots.tensors()):
                assert torch.equal(getattr(layer.slots, name)[row], getattr(slots, name)[0]), name
        assert outputs[1].eq(0).all()
        seen += (seen >= 0).long()  # whoever steps counts
    assert torch.equal(layer.slots.keys[1], idle)
    assert layer.slots.positions[1].eq(-1).all()


def test_rows_begin_empty_and_share_the_count():
    seen, like = torch.full((4,), -1), empty_slots("h2o:5,gain=value_norm")
    layer = StaticLayer.bounded(parse_policy("h2o:5,gain=value_norm"), like, seen)
    assert layer.slots.seen is seen
    assert layer.batch_size == 4
    assert layer.slots.positions.eq(-1).all()
    for name, tensor in layer.slots.tensors().items():
        assert tensor.shape == (4, *like.tensors()[name].shape[1:])
    assert layer.nbytes == 4 * (like.nbytes - like.seen.nbytes)
    assert layer.get_seq_length() == 0


def test_anything_but_one_token_of_every_row_is_refused():
    layer = StaticLayer.bounded(parse_policy("tova:5"), empty_slots("tova:5"), torch.full((2,), -1))
    for batch, length in ((2, 2), (3, 1)):
        with pytest.raises(BoundIgnored, match="one token of each of its 2 rows"):
            take(layer, *random_tokens(batch, length))
        layer.pending = None


def full_layer(backend: str, batch: int, length: int) -> FullLayer:
    seen = torch.full((batch,), -1)
    return FullLayer(parse_policy("full"), empty_slots("full"), seen, torch.zeros_like(seen), length, backend)


def test_full_layers_keep_token_p_in_slot_p():
    layer = full_layer("masked", 2, 12)
    (slots, (_, key, value)), *_ = read_separately("full", [7])
    shuffled = torch.randperm(slots.positions.shape[2], generator=torch.Generator().manual_seed(1))
    slots.keys, slots.values = slots.keys[:, :, shuffled], slots.values[:, :, shuffled]
    slots.positions = slots.positions[:, :, shuffled]
    layer.load(torch.tensor([1]), slots)
    assert torch.equal(layer.slots.keys[1, :, :7], key[0])
    assert torch.equal(layer.slots.values[1, :, :7], value[0])
    assert layer.slots.keys[0].eq(0).all()
    assert layer.nbytes == 2 * 2 * KV_HEADS * 12 * SIZE * 8


@pytest.mark.parametrize("backend, lengths", [("masked", [7, 2]), ("step", [7, 2]), ("exact", [6, 6])])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_full_attention_reads_what_a_row_has(backend, lengths, softcap):
    """`exact` has no mask, so all its slots must be filled, here by the last token. Soft caps go to our kernel."""
    attention = Attention(0.4, softcap=softcap)
    layer = full_layer(backend, 2, max(lengths) + 1)
    prompts = [random_tokens(1, length, seed=length + row) for row, length in enumerate(lengths)]
    query, key, value = random_tokens(2, 1, seed=99)
    for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        slots = empty_slots("full")
        recurrence.read(slots, *prompt, parse_policy("full"), attention)
        layer.load(torch.tensor([row]), slots)
        layer.slots.seen[row] = layer.place[row] = length
    output = take(layer, query, key, value, attention)
    for row, prompt in enumerate(prompts):
        keys, values = (
            torch.cat([old, new[row : row + 1]], 2) for old, new in zip(prompt[1:], (key, value), strict=True)
        )
        assert torch.allclose(output[row], plain(query[row : row + 1], keys, values, attention)[0], atol=1e-12)


def plain(query: Tensor, keys: Tensor, values: Tensor, attention: Attention) -> Tensor:
    if attention.softcap is None:
        return scaled_dot_product_attention(query, keys, values, scale=attention.scale, enable_gqa=True)
    logits = query @ keys.repeat_interleave(HEADS // KV_HEADS, 1).mT * attention.scale
    weights = (attention.softcap * torch.tanh(logits / attention.softcap)).softmax(-1)
    return weights @ values.repeat_interleave(HEADS // KV_HEADS, 1)


@pytest.fixture
def read_cache(llama):
    """A cache that has read 6 tokens of one sequence."""

    def read(policy: object) -> msrnn.BoundedCache:
        model = llama()
        cache = msrnn.cache(model, policy)
        with torch.no_grad():
            model(torch.randint(0, 64, (1, 6), generator=torch.Generator().manual_seed(0)), past_key_values=cache)
        return cache

    return read


def test_a_static_cache_has_a_layer_for_each_policy(read_cache):
    cache = read_cache(["tova:4", "full", "h2o:4"])
    static = StaticCache(cache, 3, length=10)
    kinds = [type(layer) for layer in static.static]
    assert kinds == [StaticLayer, FullLayer, StaticLayer]
    assert next(layer for layer in static.static if isinstance(layer, FullLayer)).backend == "masked"  # on a CPU
    assert all(layer.slots.seen is static.seen for layer in static.static)
    assert static.nbytes == sum(layer.nbytes for layer in static.static)
    static.load(torch.tensor([2]), cache)
    assert static.seen.tolist() == [-1, -1, 6]
    for ours, theirs in zip(static.static, cache.bounded, strict=True):
        if not isinstance(ours, FullLayer):
            assert torch.equal(ours.slots.positions[2], theirs.slots.positions[0])
        assert ours.slots.keys[:2].eq(0).all()


def test_idle_rows_come_back(read_cache):
    static = StaticCache(read_cache("full"), 2, length=10)
    static.seen.copy_(torch.tensor([6, -1]))
    with static.idle():
        assert static.seen.tolist() == [-1, -1]
        static.begin()
        assert static.place.tolist() == [6, 0], "a step while all are idle writes where the next token goes"
    assert static.seen.tolist() == [6, -1]


def test_the_last_place_is_that_of_the_length(read_cache):
    static = StaticCache(read_cache("full"), 1, length=10)
    static.seen.fill_(25)
    static.begin()
    assert static.place.tolist() == [9]


def test_refusals(read_cache):
    cache = read_cache("full")
    with pytest.raises(ValueError, match="give length=N"):
        StaticCache(cache, 2, length=None)
    cache.layers[1] = DynamicCache(config=cache.config).layers[1]
    with pytest.raises(Unsupported, match="layers without keys and values"):
        StaticCache(cache, 2, length=10)
