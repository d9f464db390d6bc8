"""What several files share: a tiny random Llama, one thread, as it is too small for more, and made-up records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

Llama = Callable[..., LlamaForCausalLM]


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def llama() -> Llama:
    """`llama("eager", hidden_size=64)`: three layers, grouped heads, weights large enough that texts vary."""

    def make(attn: str = "sdpa", **changes: Any) -> LlamaForCausalLM:
        shape = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        torch.manual_seed(0)
        config = LlamaConfig(**(shape | changes))
        config._attn_implementation = attn
        return LlamaForCausalLM(config).eval()

    return make


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with records of every kind."""
    from msrnn.eval.record import write_records
    from tests.support.records import everything

    path = tmp_path_factory.mktemp("results") / "all.jsonl"
    write_records(path, everything())
    return path
