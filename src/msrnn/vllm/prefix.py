"""Prefixes: state files that requests start from. Nothing here imports vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ..hf.identity import weights_digest
from ..plan import parse_layer_policy, parts
from ..state_file import read_state_file
from .plugin import Refused

CONNECTOR = {"kv_connector": "PrefixConnector", "kv_connector_module_path": "msrnn.vllm.connector"}
FILES = "prefixes"


@dataclass(frozen=True)
class Prefix:
    """A state file: its metadata (`about`), its tokens, and the slots of all layers, or of their KV heads."""

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

    @cached_property
    def starts(self) -> list[int]:
        """Where the slots of each layer begin in the file, and the end; KV heads with budgets have slots each."""
        counts = (len(parts(parse_layer_policy(text))) for text in json.loads(self.about["policy"]))
        return list(accumulate(counts, initial=0))

    def numbers(self, layer: int) -> range:
        """The numbers of a layer's slots in the file."""
        return range(self.starts[layer], self.starts[layer + 1])

    def check(self, model: str, revision: str | None, dtype: torch.dtype, policies: Sequence[str]) -> None:
        """Refuse a state of another model, dtype or policy; policies: one for all layers or one per layer."""
        theirs = json.loads(self.about["policy"])
        ours = list(policies) * (len(theirs) if len(policies) == 1 else 1)
        settings = {
            "dtype": (self.about["dtype"], str(dtype)),
            "number of layers": (str(len(theirs)), str(len(ours))),
            **{f"layer {layer}'s policy": pair for layer, pair in enumerate(zip(theirs, ours, strict=False))},
            "prompt mode": (self.about["prompt mode"], "recurrent"),
        }
        for setting, (their, our) in settings.items():
            if their != our:
                advice = "build it again for this server"
                if setting == "dtype":
                    names = [one.removeprefix("torch.") for one in (their, our)]
                    advice = f"serve with --dtype {names[0]}, or build it with --dtype {names[1]}"
                raise Refused(f"prefix {self.name}: {self.path} was made with {setting} {their}, not {our}; {advice}")
        if self.about["weights"] != weights_digest(model, revision=revision):
            raise Refused(f"prefix {self.name}: {self.path} was made with other weights than those of {model}")

    def matches(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt begins with it and is longer: the last token must be computed to predict the next."""
        return len(self.tokens) < len(prompt) and tuple(prompt[: len(self.tokens)]) == self.tokens


@cache
def read_prefixes(files: tuple[tuple[str, str], ...]) -> dict[str, Prefix]:
    """(name, path) pairs -> prefixes by name; cached, as scheduler and worker may share a process."""
    return {name: Prefix.read(name, path) for name, path in files}
