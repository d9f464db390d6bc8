"""What the experiments beyond the paper share: which books choose and which report, chunks, and losses that are kept.

    python experiments/books.py DATA        the options that give `msrnn calibrate` the choosing half

The rule of the split: books are put in the order of sha256("msrnn 1 " + file name); the first half chooses (presets,
profiles), the second half takes no part in any choice and is what is reported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from msrnn.budgets.calibrate import chunks_of
from msrnn.budgets.profile import identity
from msrnn.eval.measurements import Ledger
from msrnn.eval.perplexity import piece_for
from msrnn.eval.record import Record, write_records
from msrnn.eval.scoring import token_nll
from msrnn.hf.load import load
from msrnn.system import provenance as machine

SEED, DRAWS = 1, 4000
MODULES = ("argparse", "ast", "difflib", "doctest", "inspect", "pydoc", "tarfile", "turtle", "typing", "unittest/mock")
Texts = dict[str, Tensor]  # group (a book, a module, an article) -> chunks [N, T]
Sums = dict[str, tuple[float, int]]  # group -> nats, tokens predicted


def split(folder: Path) -> tuple[list[Path], list[Path]]:
    """The choosing half and the reporting half."""
    found = {book.stem: book for book in folder.glob("pg19/*.txt")}
    if len(found) < 2:
        raise SystemExit(f"{folder}/pg19 has {len(found)} books; at least 2 are needed")
    choosing, reporting = halves(found)
    return [found[name] for name in choosing], [found[name] for name in reporting]


def halves(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The names of books, of the choosing half and of the reporting half."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(f"msrnn 1 {name}.txt".encode()).digest())
    return ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]


def novels(tokenizer: Any, books: Sequence[Path], length: int, each: int) -> Texts:
    return _texts(tokenizer, {book.stem: book.read_text(encoding="utf-8") for book in books}, length, each)


def code(tokenizer: Any, length: int, each: int) -> Texts:
    """Modules of the standard library, whatever their version: it is part of the conditions."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = {name: folder / f"{name}.py" for name in MODULES}
    sources = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return _texts(tokenizer, sources, length, each)


def articles(tokenizer: Any, folder: Path, length: int, each: int) -> Texts:
    lines = (folder / "qasper" / "leval_scientific_qa.jsonl").read_text(encoding="utf-8").splitlines()
    return _texts(tokenizer, {f"article {i}": json.loads(line)["input"] for i, line in enumerate(lines)}, length, each)


def _texts(tokenizer: Any, texts: Mapping[str, str], length: int, each: int) -> Texts:
    ids = {name: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for name, text in texts.items()}
    return {name: chunks_of(some, length, each) for name, some in ids.items() if len(some) >= length}


class Losses:
    """Sums of nats by group under any policy, each measured once and kept in a ledger."""

    def __init__(self, model: Any, texts: Texts, batch: int, ledger: Path, name: str) -> None:
        self.model, self.texts, self.batch = model, texts, batch
        about = identity(model) | {"dtype": str(model.dtype)}
        digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in texts.values())).hexdigest()
        self.ledger = Ledger(ledger, {"model": about, "texts": name, "groups": list(texts), "sha256": digest})
        self.seconds = 0.0

    def of(self, policy: str) -> Sums:
        """`full` is the plain model."""
        if policy not in self.ledger:
            began = time.perf_counter()
            found = {"sums": self._measure(None if policy == "full" else policy)}
            self.ledger.add(policy, found | {"seconds": round(time.perf_counter() - began, 3)})
        self.seconds += self.ledger[policy]["seconds"]
        return {group: (nats, tokens) for group, (nats, tokens) in self.ledger[policy]["sums"].items()}

    def _measure(self, policy: str | None) -> dict[str, list[float]]:
        rows = torch.cat(list(self.texts.values()))
        piece = piece_for(self.model, min(self.batch, len(rows)))
        nll = torch.cat([token_nll(self.model, part, policy, piece=piece) for part in rows.split(self.batch)]).double()
        parts = nll.split([len(part) for part in self.texts.values()])
        return {name: [float(part.sum()), part.numel()] for name, part in zip(self.texts, parts, strict=True)}


def perplexity(sums: Sums) -> float:
    nats, tokens = np.array(list(sums.values())).T
    return float(np.exp(nats.sum() / tokens.sum()))


def bootstrap(statistic: Callable[..., np.ndarray], *sums: Sums) -> tuple[float, float, float]:
    """The value and its 95 % interval, whole groups (books) drawn again; the same draw for all, so pairs stay pairs.

    `statistic` takes one array of perplexities per argument.
    """
    groups = list(sums[0])
    table = np.array([[some[group] for group in groups] for some in sums])  # [policies, groups, 2]
    picks = np.random.default_rng(SEED).multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=DRAWS)
    whole = np.ones((1, len(groups)), dtype=int)

    def value(weights: np.ndarray) -> np.ndarray:
        nats, tokens = weights @ table[..., 0].T, weights @ table[..., 1].T
        return statistic(*np.exp(nats / tokens).T)

    low, high = np.nanpercentile(value(picks), [2.5, 97.5])
    return float(value(whole)[0]), float(low), float(high)


def options(about: str, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder with pg19/*.txt (and qasper/*.jsonl)")
    parser.add_argument("--model", help="a hub name or a folder (default: the bundled SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=3, help="per text")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(out), help="records; measurements are kept beside them")
    return parser


def opened(arguments: argparse.Namespace) -> tuple[Any, Any]:
    return load(arguments.model, dtype=arguments.dtype, device=arguments.device)


def ledger_of(arguments: argparse.Namespace, name: str) -> Path:
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
            model=identity(losses.model)["name"],
            policy=label,
            capacity=capacity,
            metric="perplexity",
            **dict(zip(("value", "low", "high"), bootstrap(lambda p: p, losses.of(policy)), strict=True)),
            samples=sum(len(part) for part in losses.texts.values()),
            groups=len(losses.texts),
            seed=SEED,
            dtype=str(losses.model.dtype).removeprefix("torch."),
            machine=machine.machine(device),
            versions=machine.versions(),
            commit=machine.commit(),
            date=machine.now(),
            seconds=losses.ledger[policy]["seconds"],
            peak_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
            run=task,
            settings=settings,
            parts={group: {"nll": nats, "tokens": tokens} for group, (nats, tokens) in losses.of(policy).items()},
            command=machine.command(),
        )
        for label, (policy, capacity) in policies.items()
    ]


def save(path: Path, made: Sequence[Record]) -> None:
    new = write_records(path, made)
    print(f"{len(new)} new records in {path}")


def progress(total: int, what: str) -> tqdm:
    return tqdm(total=total, desc=what, unit="policy", file=sys.stderr, mininterval=1)


if __name__ == "__main__":
    chosen, _ = split(Path(sys.argv[1]))
    print(" ".join(f"--text {book}" for book in chosen))
