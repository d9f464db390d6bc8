"""Shared by the experiments beyond the paper: development and held-out books, chunks, and resumable losses.

    python experiments/books.py DATA        the --text options that give `msrnn calibrate` the development half

The split: books in the order of sha256("msrnn 1 " + file name); the first half is for development (presets, profiles
are chosen on it), the second half is held out and is what is reported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrnn.budgets.calibrate import chunks_of
from msrnn.eval.measurements import Measurements
from msrnn.eval.perplexity import largest_piece, token_nll
from msrnn.eval.record import Record, write_records
from msrnn.eval.statistics import bootstrap
from msrnn.hf.identity import profile_identity
from msrnn.hf.load import load
from msrnn.system import provenance
from msrnn.system.console import progress as progress_bar

SEED, DRAWS = 1, 4000
MODULES = ("argparse", "ast", "difflib", "doctest", "inspect", "pydoc", "tarfile", "turtle", "typing", "unittest/mock")
Texts = dict[str, Tensor]  # group (a book, a module, an article) -> chunks [N, T]
Sums = dict[str, tuple[float, int]]  # group -> nats, tokens predicted


def split(folder: Path) -> tuple[list[Path], list[Path]]:
    """The development half and the held-out half."""
    books = {book.stem: book for book in folder.glob("pg19/*.txt")}
    if len(books) < 2:
        raise SystemExit(f"{folder}/pg19 has {len(books)} books; at least 2 are needed")
    development, held_out = halves(books)
    return [books[name] for name in development], [books[name] for name in held_out]


def halves(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The names of the development half and of the held-out half."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(f"msrnn 1 {name}.txt".encode()).digest())
    return ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]


def novels(tokenizer: Any, books: Sequence[Path], length: int, each: int) -> Texts:
    return _texts(tokenizer, {book.stem: book.read_text(encoding="utf-8") for book in books}, length, each)


def code(tokenizer: Any, length: int, each: int) -> Texts:
    """Modules of the standard library; its version is part of a record's conditions."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = {name: folder / f"{name}.py" for name in MODULES}
    sources = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return _texts(tokenizer, sources, length, each)


def articles(tokenizer: Any, folder: Path, length: int, each: int) -> Texts:
    lines = (folder / "qasper" / "leval_scientific_qa.jsonl").read_text(encoding="utf-8").splitlines()
    return _texts(tokenizer, {f"article {i}": json.loads(line)["input"] for i, line in enumerate(lines)}, length, each)


def _texts(tokenizer: Any, texts: Mapping[str, str], length: int, each: int) -> Texts:
    ids = {name: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for name, text in texts.items()}
    return {name: chunks_of(tokens, length, each) for name, tokens in ids.items() if len(tokens) >= length}


class Losses:
    """Sums of nats by group under any policy; each policy is measured once and kept in a file."""

    def __init__(self, model: Any, texts: Texts, batch: int, path: Path, name: str) -> None:
        self.model, self.texts, self.batch = model, texts, batch
        self._all_texts = texts
        about = profile_identity(model) | {"dtype": str(model.dtype)}
        digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in texts.values())).hexdigest()
        conditions = {"model": about, "texts": name, "groups": list(texts), "sha256": digest}
        self.measurements = Measurements(path, conditions)

    def of(self, policy: str) -> Sums:
        """`full` is the plain model."""
        if policy not in self.measurements:
            start = time.perf_counter()
            sums = self._measure(None if policy == "full" else policy)
            self.measurements.add(policy, {"sums": sums, "seconds": round(time.perf_counter() - start, 3)})
        return {group: tuple(self.measurements[policy]["sums"][group]) for group in self.texts}

    def subset(self, groups: Iterable[str]) -> Losses:
        """The losses of some of the texts; a policy is still measured on all of them at once."""
        part = copy(self)
        part.texts = {group: self.texts[group] for group in groups}
        return part

    def _measure(self, policy: str | None) -> dict[str, list[float]]:
        texts = self._all_texts
        rows = torch.cat(list(texts.values()))
        piece = largest_piece(self.model, min(self.batch, len(rows)))
        nll = torch.cat([token_nll(self.model, part, policy, piece=piece) for part in rows.split(self.batch)]).double()
        parts = nll.split([len(part) for part in texts.values()])
        return {name: [float(part.sum()), part.numel()] for name, part in zip(texts, parts, strict=True)}


def perplexity(sums: Sums) -> float:
    nats, tokens = np.array(list(sums.values())).T
    return float(np.exp(nats.sum() / tokens.sum()))


def interval(statistic: Callable[..., np.ndarray], *sums: Sums) -> tuple[float, float, float]:
    """A statistic of perplexities, one array per argument, and its 95 % interval from resampling groups (books).

    The same groups are drawn for all arguments, so policies are compared on the same books. With one group the interval
    is the value itself.
    """
    groups = list(sums[0])
    columns = [np.array([one[group][i] for group in groups], dtype=np.float64) for one in sums for i in (0, 1)]

    def value(totals: Sequence[np.ndarray]) -> np.ndarray:
        return statistic(*(np.exp(nats / tokens) for nats, tokens in zip(totals[::2], totals[1::2], strict=True)))

    result = bootstrap(columns, value, SEED, DRAWS)
    return result.value, *(result.value if edge is None else edge for edge in (result.low, result.high))


def show(interval: tuple[float, float, float]) -> str:
    return f"{interval[0]:.3f} [{interval[1]:.3f}, {interval[2]:.3f}]"


def options(about: str, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder with pg19/*.txt (and qasper/*.jsonl)")
    parser.add_argument("--model", help="a hub name or a folder (default: the bundled SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=3, help="per text")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(out), help="records; measurements are stored beside them")
    return parser


def load_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    return load(arguments.model, dtype=arguments.dtype, device=arguments.device)


def measurements_path(arguments: argparse.Namespace, name: str) -> Path:
    """The file of measurements beside the records."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    return arguments.out.with_name(f"{arguments.out.stem}.{name}.measured.jsonl")


def records(
    losses: Losses, task: str, policies: Mapping[str, tuple[str, int | None]], settings: dict[str, Any]
) -> list[Record]:
    """One per policy: {label: (policy as measured, capacity)}."""
    device = losses.model.device
    return [
        Record(
            task=task,
            model=profile_identity(losses.model)["name"],
            policy=label,
            capacity=capacity,
            metric="perplexity",
            **dict(zip(("value", "low", "high"), interval(lambda p: p, losses.of(policy)), strict=True)),
            samples=sum(len(part) for part in losses.texts.values()),
            groups=len(losses.texts),
            seed=SEED,
            dtype=str(losses.model.dtype).removeprefix("torch."),
            machine=provenance.machine(device),
            versions=provenance.versions(),
            commit=provenance.commit(),
            date=provenance.now(),
            seconds=losses.measurements[policy]["seconds"],
            peak_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
            run=task,
            settings=settings,
            parts={group: {"nll": nats, "tokens": tokens} for group, (nats, tokens) in losses.of(policy).items()},
            command=provenance.command(),
        )
        for label, (policy, capacity) in policies.items()
    ]


def save(path: Path, measured: Sequence[Record]) -> None:
    new = write_records(path, measured)
    print(f"{len(new)} new records in {path}")


def progress(total: int, description: str) -> Any:
    return progress_bar(total, description, "policy")


if __name__ == "__main__":
    development, _ = split(Path(sys.argv[1]))
    print(" ".join(f"--text {book}" for book in development))
