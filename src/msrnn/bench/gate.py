"""Correct first: small checks of every kernel on this very machine. A benchmark prints no speed where one fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core import recurrence, reference
from ..core.attention import Attention, weighted_sum
from ..core.heads import parts_of
from ..core.slots import Slots
from ..engine.engine import Engine
from ..engine.pipeline import PipelinedPrefill
from ..hf.cache import cache
from ..kernels import step
from ..kernels.torch import step as torch_step
from ..policy import Policy, parse_policy
from ..rnn import RNN
from .shapes import make

POLICIES = (
    *("tova:16", "window+4:16", "h2o:16", "h2o-layer:16", "tova-head:16", "tova:16,momentum=0.5", "full"),
    *("tova:16,gain=value_norm", "h2o:16,gain=value_norm", "tova:16,kv=int8", "h2o:16,kv=k8v4"),
)
Check = tuple[str, float, float]  # what is checked, its error, the largest error allowed


class GateFailed(ValueError):
    """A kernel is wrong on this machine, so its speed means nothing."""


def check(device: torch.device, policies: tuple[str, ...] = POLICIES) -> int:
    """How many checks passed; raises at the first that does not."""
    passed = 0
    for what, error, limit in _checks(policies, device):
        if not error <= limit:
            raise GateFailed(f"{what} is off by {error:.1e} on {device} (allowed: {limit:.0e}); no speed")
        passed += 1
    return passed


def _checks(policies: tuple[str, ...], device: torch.device) -> Iterator[Check]:
    yield "attention in bfloat16", _bfloat16_error(device), 2e-2
    for text in policies:
        yield from ((f"{what} of {text}", error, limit) for what, error, limit in _policy_checks(text, device))


def _policy_checks(text: str, device: torch.device) -> Iterator[Check]:
    policy = parse_policy(text)
    yield "the chunked recurrence", _recurrence_error(policy, device, torch.float64), 1e-9
    yield "the chunked recurrence in float32", _recurrence_error(policy, device, torch.float32), 1e-4
    whole = torch.float32 if policy.kv is None else torch.float64  # a rounding in float32 may change a code
    if policy.capacity is not None:
        yield "a step", _step_error(policy, device, torch.float32), 1e-4
        yield "the pipelined prefill", _pipeline_error(text, device, whole), 1e-3
    yield "the engine's text", _engine_error(text, device, whole), 0


def _recurrence_error(policy: Policy, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference from the definition; infinite if other tokens survive."""
    random = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, n, 60, 16, generator=random).double() for n in (4, 2, 2))
    definition = reference.start(policy, 4, 2)
    expected = reference.run(definition, query[0], key[0], value[0], policy, Attention(0.5))
    query, key, value = (tensor.to(device, dtype) for tensor in (query, key, value))
    slots = Slots.empty(policy, key, value, 4)
    parts = [(query[:, :, cut], key[:, :, cut], value[:, :, cut]) for cut in (slice(25), slice(25, 26), slice(26, 60))]
    output = torch.cat([recurrence.read(slots, q, k, v, policy, Attention(0.5), chunk=16) for q, k, v in parts], 2)
    for unit, rows in enumerate(definition.rows):
        survivors = sorted(p for p in slots.positions[0, unit].tolist() if p >= 0)
        if survivors != sorted(row.position for row in rows):
            return float("inf")
    return _largest_difference(output[0], expected)


def _bfloat16_error(device: torch.device) -> float:
    """The error of logits and outputs that are computed from bfloat16 as it is, without a float32 copy."""
    random = torch.Generator().manual_seed(11)
    query, key, value = (torch.randn(2, n, 24, 16, generator=random).bfloat16() for n in (4, 2, 2))
    logits = Attention(0.3).logits(query.to(device), key.to(device))
    true_logits = 0.3 * query.double() @ key.double().repeat_interleave(2, 1).mT
    weights, output = true_logits.softmax(-1), torch.empty(2, 4, 24, 16, dtype=torch.bfloat16, device=device)
    weighted_sum(weights.float().to(device), value.to(device), None, out=output)
    true_output = weights.bfloat16().double() @ value.double().repeat_interleave(2, 1)
    return max(_largest_difference(logits, true_logits), _largest_difference(output, true_output))


def _step_error(policy: Policy, device: torch.device, dtype: torch.dtype, count: int = 40) -> float:
    """Steps of the fast kernel against plain PyTorch on the CPU in float64, with an idle row among them."""
    random = torch.Generator().manual_seed(5)
    like = torch.zeros(3, 2, 1, 16, dtype=torch.float64)
    plain = Slots.empty(policy, like, like, 4)
    fast = Slots.empty(policy, like.to(device, dtype), like.to(device, dtype), 4)
    worst = 0.0
    for now in range(count):
        seen = torch.tensor([now, -1, now])
        tokens = [torch.randn(3, n, 16, generator=random).double() for n in (4, 2, 2)]  # the same in float32
        outputs = []
        for slots, run, kind in ((plain, torch_step.step, torch.float64), (fast, step, dtype)):
            query, key, value = (tensor.to(slots.keys.device, kind) for tensor in tokens)
            rows = replace(slots, seen=seen.to(slots.seen.device))
            outputs.append(run(rows, query, key, value, policy, Attention(0.25))[[0, 2]])
        worst = max(worst, _largest_difference(outputs[1], outputs[0]))
    survivors = [slots.positions.cpu().sort().values for slots in (plain, fast)]
    return worst if torch.equal(*survivors) else float("inf")


def _pipeline_error(text: str, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference of the logits after a prompt read in rounds; infinite if other tokens survive."""
    rnn = RNN(make("tiny", dtype, str(device), initializer_range=0.3), text, chunk=16)
    pipeline, worst = PipelinedPrefill(rnn, chunk=16, lanes=3, laps=2), 0.0
    for length in (260, 131):  # rounds captured, replayed, and shorter ones
        ids = torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(length)).to(device)
        expected, state = rnn.step(ids, rnn.start())
        logits, bounded = pipeline.read(ids)
        for ours, theirs in zip(bounded.bounded, state.cache.bounded, strict=True):
            pairs = zip(*(parts_of(layer.slots) for layer in (ours, theirs) if layer.slots is not None), strict=True)
            same = all(torch.equal(*(part.positions.sort().values for part in pair)) for pair in pairs)
            worst = max(worst, 0.0 if same else float("inf"))
        worst = max(worst, _largest_difference(logits, expected))
    return worst


def _engine_error(text: str, device: torch.device, dtype: torch.dtype) -> float:
    """How many rows of a ragged batch the engine writes differently from transformers' generate on the CPU."""
    model = make("tiny", dtype, "cpu", initializer_range=0.3)
    random = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 128, (size,), generator=random).tolist() for size in (33, 5, 18)]
    expected = [_generate(model, text, prompt) for prompt in prompts]
    written = Engine(model.to(device), text, batch=2, length=64).generate(prompts, max_new_tokens=8)
    return float(sum(ours != theirs for ours, theirs in zip(written, expected, strict=True)))


def _generate(model: PreTrainedModel, text: str, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    new: list[int] = model.generate(ids, past_key_values=cache(model, text), **settings)[0, len(prompt) :].tolist()
    return new


def _largest_difference(output: Tensor, expected: Tensor) -> float:
    """NaN counts as infinite."""
    return float((output.cpu().double() - expected.cpu().double()).abs().nan_to_num(torch.inf).max())
