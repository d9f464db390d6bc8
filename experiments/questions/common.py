"""Shared by the scripts of this folder: options, a model, a text, and results as a table and as records."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.analysis.policy_names import policy_capacity
from msrnn.eval.record import Cell, Record, write_records
from msrnn.hf.load import load
from msrnn.system.console import table
from msrnn.system.provenance import command, commit, machine, now, versions
from msrnn.system.text import read_blocks


def parse_options(
    about: str | None, argv: Sequence[str] | None, *, text: bool = True, **defaults: Any
) -> argparse.Namespace:
    """`--model`, `--text`, `--tokens`, `--capacity`, `-o`, and an option for each of `defaults`."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=kind, allow_abbrev=False)
    parser.add_argument("--model", help="a hub name, a folder or a .gguf file (default: the bundled SmolLM2)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--output", help="add records to this file")
    if text:
        parser.add_argument("--text", help="a UTF-8 text file (default: Python's own documentation)")
    for name, value in ({"tokens": 2048, "capacity": 256} | defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"(default: {value})")
    return parser.parse_args(argv)


def load_model(options: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    return load(options.model, device=options.device)


def read_text(options: argparse.Namespace) -> str:
    if options.text:
        return "".join(read_blocks(options.text))
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def encode(tokenizer: Any, text: str, count: int) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"][:count]
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; give a longer one")
    return ids


@dataclass
class Results:
    """Measurements of one question; `show` prints them as a table and, with an output file, appends them as records."""

    question: str
    model: PreTrainedModel
    settings: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    start: float = field(default_factory=time.perf_counter)

    def perplexity(self, policy: str, nll: Tensor | float, tokens: int, **cell: float | int | str) -> float:
        nats = float(nll.double().sum()) if isinstance(nll, Tensor) else nll
        value = math.exp(nats / tokens)
        self.add(policy, "perplexity", value, cell, {"text": {"nll": nats, "tokens": float(tokens)}}, tokens)
        return value

    def add(
        self, policy: str, metric: str, value: float, cell: Cell, parts: dict[str, dict[str, float]], samples: int
    ) -> None:
        seconds, self.start = time.perf_counter() - self.start, time.perf_counter()
        self.records.append(
            Record(
                task=f"question: {self.question}",
                model=Path(str(self.model.config.name_or_path)).name or "unnamed",
                policy=policy,
                capacity=policy_capacity(policy),
                metric=metric,
                value=value,
                low=None,
                high=None,
                samples=samples,
                groups=len(parts),
                seed=0,
                dtype=str(self.model.dtype).removeprefix("torch."),
                machine=machine(torch.device(self.model.device)),
                versions=versions(),
                commit=commit(),
                date=now(),
                seconds=round(seconds, 3),
                peak_bytes=0,
                run=self.question,
                cell=cell,
                settings=self.settings,
                parts=parts,
                command=command(),
            )
        )

    def show(self, output: str | None) -> None:
        names = list(dict.fromkeys(name for one in self.records for name in one.cell))
        header = ["policy", *names, self.records[0].metric, "seconds"]
        rows = [
            [one.policy, *[one.cell.get(name, "") for name in names], f"{one.value:.3f}", f"{one.seconds:.1f}"]
            for one in self.records
        ]
        print(table(rows, header))
        if output:
            write_records(output, self.records)
