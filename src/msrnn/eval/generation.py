"""Generation after a batch of prompts: greedy, or sampled so that a row depends on its own seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..engine.engine import Engine
from ..engine.request import Request
from ..plan import PolicyLike
from .perplexity import new_cache
from .task import Output


class GumbelNoise(LogitsProcessor):  # type: ignore[misc]
    """With Gumbel noise the argmax is a fair sample; each row has its own generator, whatever else is in the batch."""

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self.temperature = temperature
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        noise = [torch.empty_like(row, dtype=torch.float32) for row in scores]
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() / self.temperature - torch.stack(noise).log()


def generate(
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
    """At most `tokens` new ones after each prompt; without a policy, the state is full.

    `engine`: msrnn's own engine, or transformers' `generate`; None means the engine on a GPU, where it is faster.
    """
    on_gpu = model.get_input_embeddings().weight.device.type == "cuda"
    backend = _with_engine if (on_gpu if engine is None else engine) else _with_transformers
    rows = backend(model, prompts, policy, tokens, temperature, list(seeds) or [0] * len(prompts))
    eos = _eos_ids(model)
    return [_output(tokenizer, row, eos) for row in rows]


def _with_engine(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    policy: PolicyLike | None,
    tokens: int,
    temperature: float,
    seeds: Sequence[int],
) -> list[list[int]]:
    length = max(map(len, prompts)) + tokens
    engine = Engine(model, policy or "full", batch=len(prompts), length=None if policy else length)
    pairs = zip(prompts, seeds, strict=True)
    requests = [Request(prompt, tokens, temperature, seed=seed) for prompt, seed in pairs]
    return [finished.tokens for finished in sorted(engine.run(requests), key=lambda finished: finished.index)]


@torch.no_grad()
def _with_transformers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    policy: PolicyLike | None,
    tokens: int,
    temperature: float,
    seeds: Sequence[int],
) -> list[list[int]]:
    """One batch, padded on the left."""
    device = model.get_input_embeddings().weight.device
    padding = model.generation_config.pad_token_id or 0
    ids, mask = pad_left(prompts, padding)
    noise = [GumbelNoise(seeds, temperature, device)] if temperature > 0 else []
    output = model.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        past_key_values=new_cache(model, policy),
        max_new_tokens=tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=padding,
        logits_processor=LogitsProcessorList(noise),
    )
    new: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return new


def pad_left(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """ids [B, T] and mask [B, T]: 1 for a token, 0 for padding, which stands on the left."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), padding, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _eos_ids(model: PreTrainedModel) -> set[int]:
    eos = model.generation_config.eos_token_id
    return set() if eos is None else set(eos) if isinstance(eos, list) else {int(eos)}


def _output(tokenizer: Any, ids: list[int], eos: set[int]) -> Output:
    """The tokens before the first EOS; after it there is only padding."""
    stop = next((place for place, token in enumerate(ids) if token in eos), None)
    new = ids[:stop]
    return Output(ids=new, text=tokenizer.decode(new, skip_special_tokens=True), ended=stop is not None)
