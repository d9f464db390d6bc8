"""Slots inside vLLM's blocks, without vLLM: a request in a block answers as the recurrence does on its own."""

from dataclasses import replace

import pytest
import torch

from msrnn import kernels
from msrnn.core.attention import Attention
from msrnn.core.recurrence import read, step
from msrnn.core.slots import Slots
from msrnn.plan import HeadPolicies, Plan, parse_layer_policy
from msrnn.policy import parse_policy
from msrnn.vllm import settings
from msrnn.vllm.batch import attend, batch_of
from msrnn.vllm.block import Layout, clear

HEADS, KV_HEADS, SIZE, TOKENS = 6, 3, 8, 30
POLICIES = (
    *("tova:7", "tova-head:7", "tova-query-head:7", "h2o:8", "h2o-layer:8", "window+2:7", "tova+2:7,last=1"),
    *("tova:7,gain=value_norm", "h2o:8,gain=value_norm", "tova-query-head:7,gain=value_norm"),
    *("tova:7,kv=int8", "h2o:8,kv=k8v4", "window+2:7,kv=int8"),
    *("blend:8", "blend-layer+1:8,kv=int8", "tova-query-head:7,residual=0.5", "window+2:7,residual=0.9"),
)
IN_16_BITS = ("tova:7", "tova:7,kv=int8", "h2o:8,kv=k8v4", "blend-layer+1:8,kv=int8")
CASES = [
    *((text, torch.float32) for text in POLICIES),
    *((text, dtype) for text in IN_16_BITS for dtype in (torch.bfloat16, torch.float16)),
]
# Relative and absolute: in 16 bits of outputs, and of the weights of tokens that fit, which PyTorch attends to.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 2**-6), torch.float16: (2**-10, 2**-9)}


class Sharded(Attention):
    """Heads that decide together with those of other processes; here there are none."""

    @property
    def sharded(self) -> bool:
        return True


def layout_of(text: str, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout(parse_layer_policy(text), HEADS, KV_HEADS, SIZE, SIZE, dtype)


def memory(layout: Layout, blocks: int = 5, byte: int = 0x55) -> torch.Tensor:
    """Blocks as vLLM gives them, full of what another request left."""
    return torch.full((blocks, 1, 1, layout.nbytes), byte, dtype=torch.uint8).view(layout.dtype)


def texts(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    return [tuple(torch.randn(1, heads, TOKENS, SIZE).to(dtype) for heads in sizes) for _ in range(count)]


def alone(text: str, tokens: tuple[torch.Tensor, ...]) -> torch.Tensor:
    policy = parse_policy(text)
    slots = Slots.empty(policy, *tokens[1:], HEADS)
    return read(slots, *tokens, policy, Attention(SIZE**-0.5))


def read_in_block(blocks, home, before, tokens, policy, attention) -> torch.Tensor:
    """A piece of one request, as vLLM schedules it."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in tokens)
    batch = batch_of(torch.tensor([home]), torch.tensor([before]), [0, len(query)])
    output = torch.empty_like(query)
    attend(blocks, batch, query, key, value, policy, attention, output)
    return output.transpose(0, 1)[None]


def step_in_blocks(blocks, index, seen, tokens, policy, attention) -> torch.Tensor:
    """One token of some requests, as `vllm.batch.attend` runs it."""
    clear(blocks, index, seen)
    return step(replace(blocks, rows=index, seen=seen), *tokens, policy, attention)


@pytest.mark.parametrize("text, dtype", CASES, ids=str)
@pytest.mark.parametrize("kind", [Attention, Sharded])
def test_requests_in_blocks_answer_as_each_alone(text, dtype, kind):
    """Prompts of unequal length in pieces, then steps together: every output equals one uninterrupted read."""
    layout = layout_of(text, dtype)
    blocks, attention, policy = layout.carve(memory(layout)), kind(SIZE**-0.5), parse_policy(text)
    homes, lengths, requests = [3, 1, 4], [19, 4, 0], texts(3, dtype)
    outputs = [[] for _ in requests]
    for request, (home, prompt) in enumerate(zip(homes, lengths, strict=True)):
        for start, end in ((0, prompt // 2), (prompt // 2, prompt)):
            if end > start:
                tokens = [tensor[:, :, start:end] for tensor in requests[request]]
                outputs[request].append(read_in_block(blocks, home, start, tokens, policy, attention))
    for turn in range(10):
        seen = torch.tensor(lengths) + turn
        tokens = [torch.cat([t[n][:, :, lengths[i] + turn] for i, t in enumerate(requests)]) for n in range(3)]
        together = step_in_blocks(blocks, torch.tensor(homes), seen, tokens, policy, attention)
        for request in range(3):
            outputs[request].append(together[request : request + 1, :, None])
    for request, prompt in enumerate(lengths):
        expected = alone(text, requests[request])[:, :, : prompt + 10]
        relative, absolute = TOLERANCE[dtype]
        torch.testing.assert_close(torch.cat(outputs[request], 2), expected, rtol=relative, atol=absolute)
    assert ((blocks.positions[homes] >= 0).sum(-1) <= policy.capacity).all()


@pytest.mark.parametrize("text", ["tova:7", "h2o:8", "window+2:7", "h2o:8,gain=value_norm", "blend:8", "h2o:8,kv=k8v4"])
@pytest.mark.parametrize("kind", [Attention, Sharded])
@pytest.mark.parametrize("byte", [0x55, 0xFF], ids=["numbers", "NaN"])
def test_a_request_of_single_tokens_begins_empty(text, kind, byte):
    """A prompt of one token is a step, in a block that still holds what an earlier request left."""
    layout, policy = layout_of(text), parse_policy(text)
    blocks, tokens = layout.carve(memory(layout, byte=byte)), texts(1)[0]
    outputs = []
    for turn in range(12):
        new = [tensor[:, :, turn] for tensor in tokens]
        index, seen = torch.tensor([2]), torch.tensor([turn])
        outputs.append(step_in_blocks(blocks, index, seen, new, policy, kind(SIZE**-0.5)))
    torch.testing.assert_close(torch.stack(outputs, 2), alone(text, tokens)[:, :, :12], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["tova:7", "h2o:8", "h2o:8,gain=value_norm", "blend:8", "h2o:8,kv=k8v4"])
def test_a_step_touches_no_other_block(text):
    layout = layout_of(text)
    raw = memory(layout)
    blocks, before = layout.carve(raw), raw.view(torch.uint8).clone()
    tokens = [tensor[:, :, 0] for tensor in texts(1)[0]]
    step_in_blocks(blocks, torch.tensor([2]), torch.tensor([0]), tokens, parse_policy(text), Attention(SIZE**-0.5))
    changed = (raw.view(torch.uint8) != before).flatten(1).any(1)
    assert changed.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("text", ["tova:7", "h2o:8", "h2o:8,gain=value_norm", "blend:8"])
def test_clear_empties_the_blocks_of_requests_that_begin(text):
    """Of three blocks of a batch two begin; the third and the others stay as they are."""
    layout = layout_of(text)
    raw = memory(layout)
    blocks = layout.carve(raw)
    blocks.positions.copy_(torch.arange(blocks.positions.shape[2]))
    blocks.next.fill_(3)
    before = raw.view(torch.uint8).clone()
    clear(blocks, torch.tensor([4, 1, 2]), torch.tensor([0, 9, 0]))
    for block in (2, 4):
        assert (blocks.positions[block] == -1).all()
        assert not blocks.next[block].any()
        assert blocks.scores is None or not blocks.scores[block].any()
        assert blocks.residual is None or not blocks.residual[block].any()
    assert torch.equal(raw.view(torch.uint8)[[0, 1, 3]], before[[0, 1, 3]])


def test_slots_are_views_of_their_blocks():
    layout = layout_of("h2o:8,gain=value_norm")
    raw = memory(layout)
    blocks = layout.carve(raw)
    assert blocks.limit == 9
    for name, tensor in blocks.tensors().items():
        assert tensor.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr(), name
        assert len(tensor) == len(raw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv", ["", ",kv=int8", ",kv=k8v4"])
def test_parts_do_not_overlap_and_fill_the_block(kv, dtype):
    layout = layout_of(f"blend:8,gain=value_norm{kv}", dtype)
    raw = memory(layout, 2).view(torch.uint8)
    blocks = layout.carve(raw.zero_().view(dtype))
    parts = blocks.tensors()
    names = {"keys", "values", "positions", "scores", "gains", "residual", "next", "seen", *(["scales"] if kv else [])}
    assert set(parts) == names == set(layout.parts[0].tensors)
    for name, part in parts.items():
        assert not part[1].any(), f"an earlier part reaches into {name}"
        part[1] = 1
    assert not raw[0].any(), "a part reaches into another request's block"
    assert layout.nbytes % 64 == 0
    assert sum(part[1].nbytes for part in parts.values()) <= layout.nbytes
    assert blocks.gains.dtype == blocks.scores.dtype == blocks.residual.dtype == torch.float32


def test_kv_heads_with_budgets_lie_one_after_the_other():
    """As many slots as each has, and no byte of one is another's."""
    layout = layout_of("fade:8|blend:3|h2o:20,gain=value_norm,kv=int8")
    assert isinstance(layout.policy, HeadPolicies)
    raw = memory(layout, 2).view(torch.uint8)
    heads = layout.carve(raw.zero_().view(torch.float32)).heads
    assert [slots.limit for slots in heads] == [9, 4, 21]
    assert [slots.keys.shape for slots in heads] == [(2, 1, 9, SIZE), (2, 1, 4, SIZE), (2, 1, 21, SIZE)]
    alone = [Layout(policy, HEADS // KV_HEADS, 1, SIZE, SIZE, torch.float32) for policy in layout.policy.heads]
    assert layout.nbytes == sum(one.nbytes for one in alone)
    for slots in heads:
        for name, tensor in slots.tensors().items():
            assert not tensor[1].any(), f"another part reaches into {name}"
            tensor[1] = 1
    assert not raw[0].any()


def test_budgets_for_another_number_of_heads_have_no_layout():
    with pytest.raises(ValueError, match="for 2 KV heads in a layer that has 3"):
        _ = layout_of("fade:8|fade:3").nbytes


def tensors_of(text: str) -> set[str]:
    (part,) = layout_of(text).parts
    return set(part.tensors)


def test_scores_gains_and_residuals_only_where_the_policy_needs_them():
    assert "scores" in tensors_of("h2o:8")
    assert "scores" not in tensors_of("tova:8")
    assert "scores" not in tensors_of("window:8,momentum=1")
    assert "gains" in tensors_of("tova:8,gain=value_norm")
    assert "gains" not in tensors_of("h2o:8")
    assert "gains" not in tensors_of("window:8,gain=value_norm")
    assert "residual" in tensors_of("window:8,residual=1")
    assert "residual" not in tensors_of("fade:8")


def test_an_unbounded_policy_has_no_layout():
    with pytest.raises(ValueError, match="full is not bounded"):
        _ = layout_of("full").nbytes


@pytest.mark.parametrize(
    "texts",
    [
        ["tova:64"] * 3,
        ["tova:64", "window+4:32", "h2o:16,gain=value_norm"],
        ["fade:8|fade:24"] * 3,
        ["fade:8,kv=int8|fade:24,kv=int8", "tova:16", "window:9|h2o:64"],
    ],
)
def test_a_plan_survives_the_environment(texts, monkeypatch):
    plan = Plan(tuple(parse_layer_policy(text) for text in texts))
    monkeypatch.setenv("MSRNN_POLICY", settings.write(plan))
    assert [settings.policy_of(layer) for layer in range(3)] == list(plan.policies)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("full", "not bounded"),
        ("tova:1/8", "fraction"),
        ("tovva:64", "did you mean 'tova"),
        ("", "not set"),
        ("tova:8|tova:9", "KV heads decide alone, and under tova:8 they decide together"),
    ],
)
def test_what_cannot_be_served_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        settings.parse(text)


def test_a_plan_too_short_for_the_model_is_refused(monkeypatch):
    monkeypatch.setenv("MSRNN_POLICY", "tova:8;tova:9")
    with pytest.raises(ValueError, match="names 2 layers, the model has a layer 2"):
        settings.policy_of(2)


def test_a_step_hands_all_kv_heads_to_the_kernel_at_once(monkeypatch):
    """With tables that outlive the views of a batch, since a CUDA graph cannot make new ones."""
    calls, layout = [], layout_of("fade:8|fade:3|fade:20")
    raw, whole = memory(layout).zero_(), kernels.step_heads
    monkeypatch.setattr(kernels, "step_heads", lambda *arguments: calls.append(arguments) or whole(*arguments))
    new = [torch.randn(2, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    for seen in (0, 1):
        batch = batch_of(torch.tensor([3, 1]), torch.tensor([seen, seen]), [0, 1, 2])
        attend(layout.carve(raw), batch, *new, layout.policy, Attention(1.0), torch.empty(2, HEADS, SIZE))
    (first, *_, tables, _), (again, *_, others, _) = calls
    assert [slots.limit for slots in first] == [slots.limit for slots in again] == [9, 4, 21]
    assert all(slots.rows.tolist() == [3, 1] for slots in first)
    assert tables is others
