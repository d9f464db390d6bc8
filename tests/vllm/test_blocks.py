"""States inside vLLM's blocks, without vLLM: what its plugin keeps is what the recurrence keeps."""

import pytest
import torch

from msrnn.core import recurrence
from msrnn.core.attention import Attention
from msrnn.core.slots import State
from msrnn.policy import Plan, parse
from msrnn.vllm import settings
from msrnn.vllm.block import Layout
from msrnn.vllm.step import step

HEADS, KV_HEADS, SIZE, TOKENS = 6, 3, 8, 30
POLICIES = ("tova:7", "tova-head:7", "tova-query-head:7", "h2o:8", "h2o-layer:8", "window+2:7", "tova+2:7,last=1")


class Spread(Attention):
    """Heads that decide together with those of other processes: here there are none."""


def layout(policy: str, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout(parse(policy), HEADS, KV_HEADS, SIZE, SIZE, dtype)


def memory(of: Layout, blocks: int = 5) -> torch.Tensor:
    """Blocks as vLLM gives them, full of what another request left."""
    filling = torch.full((blocks, 1, 1, of.nbytes), 0x55, dtype=torch.uint8)
    return filling.view(of.dtype)


def texts(count: int) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    return [tuple(torch.randn(1, heads, TOKENS, SIZE) for heads in sizes) for _ in range(count)]


def alone(policy: str, text: tuple[torch.Tensor, ...]) -> torch.Tensor:
    query, key, value = text
    state = State.empty(parse(policy), key, value, HEADS)
    return recurrence.run(state, query, key, value, parse(policy), Attention(SIZE**-0.5))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [Attention, Spread])
def test_requests_in_blocks_answer_as_each_alone(policy, kind):
    """Prompts of unequal length in pieces, then steps together: every output equals one undisturbed reading."""
    of = layout(policy)
    blocks, attention, made = of.carve(memory(of)), kind(SIZE**-0.5), parse(policy)
    homes, read, given = [3, 1, 4], [19, 4, 0], texts(3)
    outputs = [[] for _ in given]
    for request, (home, prompt) in enumerate(zip(homes, read, strict=True)):
        blocks.clear(home)
        for start, end in ((0, prompt // 2), (prompt // 2, prompt)):
            if end > start:
                news = [tensor[:, :, start:end] for tensor in given[request]]
                outputs[request].append(recurrence.run(blocks.state(home, start, end - start), *news, made, attention))
    for turn in range(10):
        seen = torch.tensor(read) + turn
        news = [torch.cat([text[n][:, :, read[i] + turn] for i, text in enumerate(given)]) for n in range(3)]
        index = torch.tensor(homes)
        blocks.clear_new(index, seen)
        together = step(blocks, index, seen, *news, made, attention)
        for request in range(3):
            outputs[request].append(together[request : request + 1, :, None])
    for request, prompt in enumerate(read):
        expected = alone(policy, given[request])[:, :, : prompt + 10]
        torch.testing.assert_close(torch.cat(outputs[request], 2), expected, rtol=1e-5, atol=1e-5)
    assert ((blocks.positions[homes] >= 0).sum(-1) <= made.capacity).all()


@pytest.mark.parametrize("policy", ["tova:7", "h2o:8", "window+2:7"])
def test_a_request_of_single_tokens_begins_clean(policy):
    """A prompt of one token is a step, in a block that still holds what an earlier request left."""
    of = layout(policy)
    blocks, text = of.carve(memory(of)), texts(1)[0]
    index, outputs = torch.tensor([2]), []
    for turn in range(12):
        seen = torch.tensor([turn])
        blocks.clear_new(index, seen)
        news = [tensor[:, :, turn] for tensor in text]
        outputs.append(step(blocks, index, seen, *news, parse(policy), Attention(SIZE**-0.5)))
    torch.testing.assert_close(torch.stack(outputs, 2), alone(policy, text)[:, :, :12], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["tova:7", "h2o:8"])
def test_a_step_touches_no_other_block(policy):
    of = layout(policy)
    raw = memory(of)
    blocks, before = of.carve(raw), raw.view(torch.uint8).clone()
    query, key, value = (tensor[:, :, 0] for tensor in texts(1)[0])
    index, seen = torch.tensor([2]), torch.tensor([0])
    blocks.clear_new(index, seen)
    step(blocks, index, seen, query, key, value, parse(policy), Attention(SIZE**-0.5))
    changed = (raw.view(torch.uint8) != before).flatten(1).any(1)
    assert changed.tolist() == [False, False, True, False, False]


def test_parts_do_not_overlap_and_fill_the_block():
    of = layout("h2o:8", torch.bfloat16)
    raw = memory(of, 2).view(torch.uint8)
    blocks = of.carve(raw.zero_().view(torch.bfloat16))
    for part in (blocks.keys, blocks.values, blocks.positions, blocks.slot, blocks.seen, blocks.scores):
        assert not part[1].any(), "an earlier part reaches into this one"
        part[1] = 1
    assert not raw[0].any(), "a part reaches into another request's block"
    assert of.nbytes % 64 == 0


def test_scores_only_where_they_are_remembered():
    assert "scores" in layout("h2o:8").parts
    assert "scores" not in layout("tova:8").parts
    assert "scores" not in layout("window:8,momentum=1").parts


@pytest.mark.parametrize("texts", [["tova:64"] * 3, ["tova:64", "window+4:32", "h2o:16"]])
def test_a_plan_survives_the_environment(texts, monkeypatch):
    plan = Plan(tuple(parse(text) for text in texts))
    monkeypatch.setenv("MSRNN_POLICY", settings.write(plan))
    assert [settings.policy_of(layer) for layer in range(3)] == list(plan.policies)


@pytest.mark.parametrize(
    "text, reason",
    [("full", "not bounded"), ("tova:1/8", "fraction"), ("tovva:64", "did you mean 'tova"), ("", "not set")],
)
def test_what_cannot_be_served_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        settings.read(text)


def test_a_plan_too_short_for_the_model_is_refused(monkeypatch):
    monkeypatch.setenv("MSRNN_POLICY", "tova:8;tova:9")
    with pytest.raises(ValueError, match="names 2 layers, the model has a layer 2"):
        settings.policy_of(2)
