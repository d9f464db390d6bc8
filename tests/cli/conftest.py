"""What the tests of commands share: a text, the bundled tokenizer, a tiny model in a folder, a server not started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from msrnn.hf.load import bundled
from tests.support.commands import STORY, save
from tests.support.serving import served_model, started  # noqa: F401 - fixtures


@pytest.fixture
def story(tmp_path: Path) -> str:
    file = tmp_path / "story.txt"
    file.write_text(STORY * 6)
    return str(file)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(bundled())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """A folder with a small random model that has the bundled model's tokenizer, but no chat template."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": len(tokenizer)}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    path = tmp_path_factory.mktemp("tiny")
    plain = AutoTokenizer.from_pretrained(bundled())
    plain.chat_template = None
    return save(path, LlamaForCausalLM(config), plain)
