"""What several files share: a tiny random Llama, one thread, as it is too small for more, and made-up records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.models import tiny_llama

try:
    from hypothesis import settings
except ImportError:  # vLLM's environment has none
    pass
else:  # examples take longer on a busy machine, and where something is compiled; CI's own settings stay otherwise
    settings.register_profile("any machine", settings(), deadline=None)
    settings.load_profile("any machine")

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
    return tiny_llama


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with records of every kind."""
    from msrnn.eval.record import write_records
    from tests.support.records import everything

    path = tmp_path_factory.mktemp("results") / "all.jsonl"
    write_records(path, everything())
    return path
