"""Correct first: small checks of every kernel on this very machine. A benchmark prints no speed where one fails."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ..core import recurrence, reference
from ..core.attention import Attention, mix
from ..core.slots import State
from ..engine.engine import Engine
from ..engine.pipeline import Wavefront
from ..hf.cache import cache
from ..kernels.step import step
from ..kernels.torch import step as eager_step
from ..policy import Policy, parse
from ..rnn import RNN
from .shapes import make

POLICIES = ("tova:16", "window+4:16", "h2o:16", "h2o-layer:16", "tova-head:16", "tova:16,momentum=0.5", "full")


class GateFailed(ValueError):
    """A kernel is wrong on this machine; nothing it does fast is worth knowing."""


def check(device: torch.device, policies: tuple[str, ...] = POLICIES) -> int:
    """How many checks passed; raises at the first that does not."""
    passed = 0
    for what, off, limit in _every(policies, device):
        if not off <= limit:
            raise GateFailed(f"{what} is off by {off:.1e} on {device} (allowed: {limit:.0e}); no speed")
        passed += 1
    return passed


def _every(policies: tuple[str, ...], device: torch.device) -> Iterator[tuple[str, float, float]]:
    yield "attention in bfloat16", _narrow(device), 2e-2
    for text in policies:
        yield from ((f"{what} of {text}", off, limit) for what, off, limit in _checks(text, device))


def _checks(text: str, device: torch.device) -> Iterator[tuple[str, float, float]]:
    policy = parse(text)
    yield "the chunked recurrence", _recurrence(policy, device, torch.float64), 1e-9
    yield "the chunked recurrence in float32", _recurrence(policy, device, torch.float32), 1e-4
    if policy.capacity is not None:
        yield "a step", _steps(policy, device, torch.float32), 1e-4
        yield "the wavefront", _wavefront(text, device), 1e-3
    yield "the engine's text", _engine(text, device), 0


def _recurrence(policy: Policy, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference from the definition; infinite if others survive."""
    made = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, n, 60, 16, dtype=torch.float64, generator=made) for n in (4, 2, 2))
    ref = reference.start(policy, 4, 2)
    want = reference.run(ref, query[0], key[0], value[0], policy, Attention(0.5))
    query, key, value = (tensor.to(device, dtype) for tensor in (query, key, value))
    state = State.empty(policy, key, value, 4)
    parts = [(query[:, :, cut], key[:, :, cut], value[:, :, cut]) for cut in (slice(25), slice(25, 26), slice(26, 60))]
    out = torch.cat([recurrence.run(state, q, k, v, policy, Attention(0.5), chunk=16) for q, k, v in parts], 2)
    for unit, rows in enumerate(ref.rows):
        kept = sorted(p for p in state.positions[0, unit].tolist() if p >= 0)
        if kept != sorted(row.position for row in rows):
            return float("inf")
    return float((out[0].cpu().double() - want).abs().max())


def _narrow(device: torch.device) -> float:
    """How far logits and outputs are off that are made from bfloat16 as they are, without a wider copy."""
    made = torch.Generator().manual_seed(11)
    query, key, value = (torch.randn(2, n, 24, 16, generator=made).bfloat16() for n in (4, 2, 2))
    logits = Attention(0.3).logits(query.to(device), key.to(device))
    wide = key.double().repeat_interleave(2, 1)
    want = 0.3 * query.double() @ wide.mT
    weights, out = want.softmax(-1), torch.empty(2, 4, 24, 16, dtype=torch.bfloat16, device=device)
    mix(weights.float().to(device), value.to(device), None, out=out)
    mixed = weights.bfloat16().double() @ value.double().repeat_interleave(2, 1)
    return max(float((got.cpu().double() - true).abs().max()) for got, true in ((logits, want), (out, mixed)))


def _steps(policy: Policy, device: torch.device, dtype: torch.dtype, count: int = 40) -> float:
    """Steps of the fast kernel beside the plain one on the CPU in float64, an idle row among them."""
    made = torch.Generator().manual_seed(5)
    like = torch.zeros(3, 2, 1, 16, dtype=torch.float64)
    plain = State.empty(policy, like, like, 4)
    fast = State.empty(policy, like.to(device, dtype), like.to(device, dtype), 4)
    slots = [torch.zeros(state.positions.shape[:2], dtype=torch.int64, device=state.seen.device)
             for state in (plain, fast)]  # fmt: skip
    worst = 0.0
    for now in range(count):
        seen = torch.tensor([now, -1, now])
        query, key, value = (torch.randn(3, n, 16, dtype=torch.float64, generator=made) for n in (4, 2, 2))
        outputs = []
        for state, slot, run in ((plain, slots[0], eager_step.step), (fast, slots[1], step)):
            q, k, v = (tensor.to(state.keys.device, state.keys.dtype) for tensor in (query, key, value))
            held = (state.keys, state.values, state.positions, state.scores, slot, seen.to(slot.device))
            outputs.append(run(q, k, v, *held, policy, Attention(0.25))[[0, 2]].cpu().double())
        worst = max(worst, float((outputs[0] - outputs[1]).abs().nan_to_num(torch.inf).max()))
    kept = [state.positions.cpu().sort().values for state in (plain, fast)]
    return worst if torch.equal(*kept) else float("inf")


def _wavefront(text: str, device: torch.device) -> float:
    """The largest difference of the logits after a prompt read in rounds; infinite if other tokens survive."""
    rnn = RNN(make("tiny", torch.float32, str(device), initializer_range=0.3), text, chunk=16)
    front, worst = Wavefront(rnn, chunk=16, lanes=3, laps=2), 0.0
    for length in (260, 131):  # rounds captured, replayed, and shorter ones
        ids = torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(length)).to(device)
        want, state = rnn.step(ids, rnn.start())
        got, read = front.read(ids)
        for mine, theirs in zip(read.bounded, state.cache.bounded, strict=True):
            kept = [layer.state.positions.sort().values for layer in (mine, theirs) if layer.state is not None]
            worst = max(worst, 0.0 if torch.equal(*kept) else float("inf"))
        worst = max(worst, float((got - want).abs().nan_to_num(torch.inf).max()))
    return worst


def _engine(text: str, device: torch.device) -> float:
    """How many rows of a ragged batch the engine writes differently from transformers' generate on the CPU."""
    model = make("tiny", torch.float32, "cpu", initializer_range=0.3)
    made = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 128, (size,), generator=made).tolist() for size in (33, 5, 18)]
    want = [_plainly(model, text, prompt) for prompt in prompts]
    got = Engine(model.to(device), text, batch=2, length=64).generate(prompts, max_new_tokens=8)
    return float(sum(a != b for a, b in zip(want, got, strict=True)))


def _plainly(model: PreTrainedModel, text: str, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    new: list[int] = model.generate(ids, past_key_values=cache(model, text), **settings)[0, len(prompt) :].tolist()
    return new
