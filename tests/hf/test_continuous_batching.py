"""Continuous batching beside bounded caches: it runs as before and refuses one, on every copy of a model."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import msrnn
from tests.support.models import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = {"max_new_tokens": 8, "do_sample": False}
IDS = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))
SMALL = hf.ContinuousBatchingConfig(num_blocks=8, block_size=32, max_batch_tokens=64)  # else it takes all free memory
PAGED = {"cache_implementation": "paged", "continuous_batching_config": SMALL, "warmup": False}
REFUSED = "continuous batching.*paged.*leave one of the two out"


def batch(model: LlamaForCausalLM) -> Tensor:
    config = hf.GenerationConfig(eos_token_id=-1, **GREEDY)
    outputs = model.generate_batch(
        inputs=IDS.tolist(), generation_config=config, continuous_batching_config=SMALL, warmup=False
    )
    return torch.tensor([one.generated_tokens for one in outputs.values()])


def paged(model: LlamaForCausalLM) -> Tensor:
    return model.generate(IDS, **PAGED, **GREEDY)[0, :, 12:]


def test_it_runs_as_before() -> None:
    """Before `cache()`, after it, and after a bounded call; for `generate_batch` see test_generate.py."""
    model = tiny_llama("eager")
    want = model.generate(IDS, **GREEDY)[:, 12:]
    assert torch.equal(paged(model), want)
    cache = msrnn.cache(model, "tova:6")
    assert torch.equal(paged(model), want)
    model.generate(IDS, past_key_values=cache, **GREEDY)
    assert torch.equal(paged(model), want)
    assert cache.held == 6


def test_its_own_arguments_are_still_shown() -> None:
    """`help` and tools that read signatures see transformers' function."""
    import inspect

    msrnn.cache(tiny_llama(), "tova:6")
    signature = inspect.signature(LlamaForCausalLM.generate_batch)
    assert "continuous_batching_config" in signature.parameters
    assert LlamaForCausalLM.generate_batch.__name__ == "generate_batch"


def test_the_check_is_there_once() -> None:
    model = tiny_llama()
    msrnn.cache(model, "tova:6")
    first = LlamaForCausalLM.generate_batch
    msrnn.cache(tiny_llama(), "tova:6")
    assert LlamaForCausalLM.generate_batch is first


class Wrapper(nn.Module):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.base_model = model

    def generate(self, *args, **kwargs) -> Tensor:
        return self.base_model.generate(*args, **kwargs)


COPIES: dict[str, Callable[[LlamaForCausalLM], nn.Module]] = {
    "itself": lambda model: model,
    "shallow": copy.copy,
    "deep": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "wrapped": Wrapper,
    "never prepared": lambda model: tiny_llama("eager"),
}


@pytest.mark.parametrize("kind", COPIES)
def test_every_copy_refuses_a_bounded_cache(kind: str) -> None:
    model = tiny_llama("eager")
    cache = msrnn.cache(model, "tova:6")
    twin = COPIES[kind](model)
    with pytest.raises(ValueError, match=REFUSED):
        twin.generate(IDS, past_key_values=cache, **PAGED, **GREEDY)
    assert cache.get_seq_length() == 0
    assert model.config._attn_implementation == "eager"


def test_generate_batch_refuses_it_too() -> None:
    model = tiny_llama("eager")
    cache = msrnn.cache(model, "tova:6")
    for call in (model.generate_batch, lambda **given: type(model).generate_batch(model, **given)):
        with pytest.raises(ValueError, match=REFUSED):
            call(inputs=IDS.tolist(), past_key_values=cache, continuous_batching_config=SMALL)
    assert torch.equal(batch(model), model.generate(IDS, **GREEDY)[:, 12:])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_bounded(copied: Callable[[LlamaForCausalLM], LlamaForCausalLM]) -> None:
    model = tiny_llama()
    want = model.generate(IDS, past_key_values=msrnn.cache(model, "tova:6"), **GREEDY)
    twin = copied(model)
    cache = msrnn.cache(twin, "tova:6")
    assert torch.equal(twin.generate(IDS, past_key_values=cache, **GREEDY), want)
    assert cache.held == 6


def test_a_model_is_freed_without_the_garbage_collector() -> None:
    """No reference cycle: the memory of a large model returns at `del`."""
    model = tiny_llama("eager")
    cache = msrnn.cache(model, "tova:6")
    model.generate(IDS, past_key_values=cache, **GREEDY)
    with pytest.raises(ValueError, match=REFUSED):
        model.generate(IDS, past_key_values=cache, **PAGED, **GREEDY)
    alive, enabled = weakref.ref(model), gc.isenabled()
    gc.disable()
    try:
        del model, cache
        assert alive() is None
    finally:
        if enabled:
            gc.enable()


OTHER_PROCESS = """
import pickle, sys, torch
model, cache, ids = pickle.load(open(sys.argv[1], "rb"))
try:
    model.generate(ids, past_key_values=cache, cache_implementation="paged", max_new_tokens=8, do_sample=False)
except ValueError as error:
    print(error)
print(model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False).tolist(), cache.held)
"""


def test_a_cache_from_another_process(tmp_path: Path) -> None:
    model = tiny_llama()
    cache = msrnn.cache(model, "tova:6")
    model(IDS, past_key_values=cache)
    text = torch.cat([IDS, IDS], 1)
    with open(tmp_path / "cache.pickle", "wb") as file:
        pickle.dump((model, cache, text), file)
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "cache.pickle")]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    want = model.generate(text, past_key_values=cache, **GREEDY).tolist()
    refusal, answer = output.strip().splitlines()[-2:]
    assert "leave one of the two out" in refusal
    assert answer == f"{want} 6"
