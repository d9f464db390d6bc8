"""Prefixes that were read once: state files that requests start from. This file knows the files, not vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..hf.identity import weights_digest
from ..state_file import read_state_file
from .plugin import Refused

CONNECTOR = {"kv_connector": "PrefixConnector", "kv_connector_module_path": "msrnn.vllm.connector"}
FILES = "prefixes"


@dataclass(frozen=True)
class Prefix:
    """A state file: what it was made for, its tokens, and the states of all layers."""

    name: str
    path: str
    about: dict[str, str]
    tokens: tuple[int, ...]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, name: str, path: str | Path) -> Prefix:
        about, tensors = read_state_file(path)
        if "tokens" not in tensors or "weights" not in about:
            raise Refused(f"prefix {name}: {path} does not say what was read; make it with `msrnn state build`")
        tokens = tuple(tensors.pop("tokens").tolist())
        return cls(name, str(path), about, tokens, tensors)

    def check(self, model: str, revision: str | None, dtype: torch.dtype, policies: Sequence[str]) -> None:
        """Refuse a state of another model, dtype or policy; policies: one for all layers or one per layer."""
        made = json.loads(self.about["policy"])
        wanted = list(policies) * (len(made) if len(policies) == 1 else 1)
        facts = {
            "dtype": (self.about["dtype"], str(dtype)),
            "policy": (_brief(made), _brief(wanted)),
            "prompt mode": (self.about["prompt mode"], "recurrent"),
        }
        for what, (found, needed) in facts.items():
            if found != needed:
                raise Refused(f"prefix {self.name}: {self.path} was made with {what} {found}, not {needed}")
        if self.about["weights"] != weights_digest(model, revision=revision):
            raise Refused(f"prefix {self.name}: {self.path} was made with other weights than those of {model}")

    def begins(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt begins with it and goes on: its last token must be computed, to know what follows it."""
        return len(self.tokens) < len(prompt) and tuple(prompt[: len(self.tokens)]) == self.tokens


def _brief(policies: list[str]) -> str:
    return policies[0] if len(set(policies)) == 1 else ";".join(policies)


@cache
def read_all(files: tuple[tuple[str, str], ...]) -> dict[str, Prefix]:
    """The named files; scheduler and worker may live in one process."""
    return {name: Prefix.read(name, path) for name, path in files}
