"""What the scripts of experiments/questions share: options, a model, a text, and an answer as table and records."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..eval.record import Cell, Record, write_records
from ..hf.load import load
from ..system.provenance import command, commit, machine, now, versions
from ..system.text import read_blocks
from .benchmarks import capacity_in


def arguments(
    about: str | None, argv: Sequence[str] | None, *, text: bool = True, **defaults: Any
) -> argparse.Namespace:
    """`--model`, `--text`, `--tokens`, `--capacity`, `-o`, and whatever has a default of its own here."""
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


def opened(options: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    return load(options.model, device=options.device)


def text_of(options: argparse.Namespace) -> str:
    if options.text:
        return "".join(read_blocks(options.text))
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def ids_of(tokenizer: Any, text: str, count: int) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"][:count]
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; give a longer one")
    return ids


@dataclass
class Answer:
    """Lines of a table as they are found; `show` prints them and, where asked, adds them to a file as records."""

    question: str
    model: PreTrainedModel
    settings: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def perplexity(self, policy: str, nll: Tensor | float, tokens: int, **cell: float | int | str) -> float:
        nats = float(nll.double().sum()) if isinstance(nll, Tensor) else nll
        value = math.exp(nats / tokens)
        self.add(policy, "perplexity", value, cell, {"text": {"nll": nats, "tokens": float(tokens)}}, tokens)
        return value

    def add(
        self, policy: str, metric: str, value: float, cell: Cell, parts: dict[str, dict[str, float]], samples: int
    ) -> None:
        seconds, self.began = time.perf_counter() - self.began, time.perf_counter()
        self.records.append(
            Record(
                task=f"question: {self.question}",
                model=Path(str(self.model.config.name_or_path)).name or "unnamed",
                policy=policy,
                capacity=capacity_in(policy),
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
        head = ["policy", *names, self.records[0].metric, "seconds"]
        rows = [[one.policy, *[str(one.cell.get(n, "")) for n in names], f"{one.value:.3f}", f"{one.seconds:.1f}"]
                for one in self.records]  # fmt: skip
        print(aligned([head, *rows]))
        if output:
            write_records(output, self.records)


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Rows of text as columns, names to the left and numbers to the right."""
    table = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in table]
    return "\n".join("  ".join(line) for line in lines)
