"""What a policy writes after each prompt of a batch: greedy, or sampled so that a story depends on its seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..engine.engine import Engine, Request
from ..policy import PolicyLike
from .perplexity import empty
from .task import Output


class SeededNoise(LogitsProcessor):  # type: ignore[misc]
    """Gumbel noise makes the likeliest token a fair sample; each row has its own source, whoever shares the batch."""

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self.temperature = temperature
        self.sources = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = [torch.empty_like(row, dtype=torch.float32) for row in scores]
        for row, source in zip(noise, self.sources, strict=True):
            row.exponential_(generator=source)
        return scores.float() / self.temperature - torch.stack(noise).log()


def write(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    policy: PolicyLike | None,
    tokens: int,
    *,
    temperature: float = 0.0,
    seeds: Sequence[int] = (),
    engine: bool | None = None,
) -> list[Output]:
    """At most `tokens` new ones after each prompt; without a policy, everything is kept.

    `engine`: by msrnn's own engine, or by transformers' `generate`; None means the engine on a GPU, where it is faster.
    """
    on_gpu = model.get_input_embeddings().weight.device.type == "cuda"
    by = _by_engine if (on_gpu if engine is None else engine) else _by_generate
    made = by(model, prompts, policy, tokens, temperature, list(seeds) or [0] * len(prompts))
    ends = _ends(model)
    return [_output(tokenizer, row, ends) for row in made]


def _by_engine(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    policy: PolicyLike | None,
    tokens: int,
    temperature: float,
    seeds: Sequence[int],
) -> list[list[int]]:
    room = max(map(len, prompts)) + tokens
    engine = Engine(model, policy or "full", batch=len(prompts), length=None if policy else room)
    pairs = zip(prompts, seeds, strict=True)
    asked = [Request(prompt, tokens, temperature, seed=seed) for prompt, seed in pairs]
    return [done.tokens for done in sorted(engine.run(asked), key=lambda done: done.index)]


@torch.no_grad()
def _by_generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    policy: PolicyLike | None,
    tokens: int,
    temperature: float,
    seeds: Sequence[int],
) -> list[list[int]]:
    """One batch, padded on the left."""
    device = model.get_input_embeddings().weight.device
    filler = model.generation_config.pad_token_id or 0
    ids, mask = pad_left(prompts, filler)
    noise = [SeededNoise(seeds, temperature, device)] if temperature > 0 else []
    made = model.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        past_key_values=empty(model, policy),
        max_new_tokens=tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=filler,
        logits_processor=LogitsProcessorList(noise),
    )
    new: list[list[int]] = made[:, ids.shape[1] :].tolist()
    return new


def pad_left(prompts: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor]:
    """ids [B, T] and mask [B, T]: 1 for a token, 0 for padding, which stands on the left."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), filler, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _ends(model: PreTrainedModel) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {int(ends)}


def _output(tokenizer: Any, ids: list[int], ends: set[int]) -> Output:
    """What was written before the end token; after it there is padding only."""
    stop = next((place for place, one in enumerate(ids) if one in ends), None)
    kept = ids[:stop]
    return Output(ids=kept, text=tokenizer.decode(kept, skip_special_tokens=True), ended=stop is not None)
