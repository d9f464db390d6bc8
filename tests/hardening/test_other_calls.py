"""Calls without our cache, after `cache()` and after bounded calls: the same results as before, on every path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import msrnn
from tests.support import tiny_eval
from tests.support.models import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = {"max_new_tokens": 12, "do_sample": False}
IDS = torch.randint(3, 64, (1, 14), generator=torch.Generator().manual_seed(0))


class Wrapper(nn.Module):
    """A model inside a model, as PEFT and others wrap it."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def step_by_step(model: LlamaForCausalLM, input_ids: Tensor, **_: Any) -> Tensor:
    """A user's own decoding loop, for `custom_generate`."""
    for _ in range(12):
        input_ids = torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(-1)], 1)
    return input_ids


def offloaded(model: LlamaForCausalLM) -> Tensor:
    return model.generate(IDS, past_key_values=hf.DynamicCache(config=model.config, offloading=False), **GREEDY)


PATHS: dict[str, Callable[[LlamaForCausalLM], Tensor]] = {
    "assistant": lambda model: model.generate(IDS, assistant_model=tiny_llama(num_hidden_layers=1), **GREEDY),
    "early exit": lambda model: model.generate(IDS, assistant_early_exit=1, **GREEDY),
    "lookup": lambda model: model.generate(IDS, prompt_lookup_num_tokens=3, **GREEDY),
    "custom": lambda model: model.generate(IDS, custom_generate=step_by_step, **GREEDY),
    "static": lambda model: model.generate(IDS, cache_implementation="static", **GREEDY),
    "dynamic": offloaded,
    "sampled": lambda model: (torch.manual_seed(0), model.generate(IDS, max_new_tokens=12, do_sample=True))[1],
    "beams": lambda model: model.generate(IDS, num_beams=2, **GREEDY),
    "group of samples": lambda model: (
        torch.manual_seed(0),
        model.generate(IDS, max_new_tokens=12, do_sample=True, num_return_sequences=3),
    )[1],
    "wrapped": lambda model: Wrapper(model)(IDS).logits,
    "data parallel": lambda model: nn.DataParallel(model)(IDS).logits,
    "hidden states": lambda model: torch.stack(model(IDS, output_hidden_states=True).hidden_states),
    "inner model": lambda model: model.model(IDS).last_hidden_state,
    "gradients": lambda model: torch.autograd.grad(model(IDS).logits.sum(), [model.lm_head.weight])[0],
    "compiled": lambda model: torch.compile(model, backend="eager")(IDS).logits,
    "guided": lambda model: model.generate(IDS, guidance_scale=1.5, **GREEDY),
    "no cache": lambda model: model.generate(IDS, use_cache=False, **GREEDY),
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_as_before(path: str) -> None:
    model = tiny_llama()
    torch._dynamo.reset()
    try:
        before = PATHS[path](model)
    except (ImportError, TypeError, NotImplementedError) as error:
        pytest.skip(f"not in this transformers: {error}")
    cache = msrnn.cache(model, "tova:6")
    assert torch.equal(PATHS[path](model), before)
    model.generate(IDS, past_key_values=cache, **GREEDY)
    assert torch.equal(PATHS[path](model), before)
    assert cache.held == 6


def test_a_pipeline_is_as_before() -> None:
    model, tokenizer = tiny_eval.model(), tiny_eval.tokenizer()
    generator = hf.pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["the river said", "an old captain"]
    before = [generator(text, **GREEDY) for text in texts]
    cache = msrnn.cache(model, "tova:6")
    assert [generator(text, **GREEDY) for text in texts] == before
    bounded = generator(texts[0], past_key_values=cache, **GREEDY)
    assert cache.held == 6
    assert bounded != before[0]
    assert [generator(text, **GREEDY) for text in texts] == before


def test_a_wrapped_model_is_bounded() -> None:
    model = tiny_llama()
    want = msrnn.cache(model, "tova:6")
    logits = model(IDS, past_key_values=want).logits
    cache = msrnn.cache(model, "tova:6")
    assert torch.equal(Wrapper(model)(IDS, past_key_values=cache).logits, logits)
    assert cache.held == 6


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_two_threads(attn: str) -> None:
    """One reads with a bounded cache, one without, at the same time: both get what they get alone."""
    model = tiny_llama(attn)
    text = torch.randint(3, 64, (2, 60), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(text)
    mask[1, :20] = 0
    plain = model(text, attention_mask=mask).logits
    want = model(text, past_key_values=msrnn.cache(model, "tova:6")).logits
    errors: list[BaseException] = []

    def repeat(call: Callable[[], Tensor], expected: Tensor) -> None:
        try:
            for _ in range(40):
                assert torch.equal(call(), expected)
        except BaseException as error:
            errors.append(error)

    calls = [
        (lambda: model(text, past_key_values=msrnn.cache(model, "tova:6")).logits, want),
        (lambda: model(text, past_key_values=msrnn.cache(model, "tova:6")).logits, want),
        (lambda: model(text, attention_mask=mask).logits, plain),
    ]
    threads = [threading.Thread(target=torch.no_grad()(repeat), args=pair) for pair in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert model.config._attn_implementation == attn
