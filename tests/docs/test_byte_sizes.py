"""The capacities in docs/budgets.md that 64 MiB hold on an 8B model."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import LlamaConfig

from msrnn.hf.best import resolve
from msrnn.policy import split_policy

PAGE = Path(__file__).parents[2] / "docs" / "budgets.md"


def test_the_table_of_sizes_in_bytes() -> None:
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    section = PAGE.read_text().split("## Sizes in bytes\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.+)` \| ([\d,]+) \|$", section, re.MULTILINE)
    assert len(rows) == 5
    for kind, capacity in rows:
        policy = str(resolve(split_policy(kind).with_size("64MiB"), LlamaConfig(**shape), dtype=torch.bfloat16))
        assert split_policy(policy).size == capacity.replace(",", ""), kind
