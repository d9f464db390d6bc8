"""TinyLlama on a GPU: the tables of the evaluation, most valuable first, within a number of seconds.

    python experiments/tinyllama_gpu.py --data FOLDER --out FOLDER --seconds 300 [--only pg19 ruler ...] [--tiny]

Every part has a limit of its own and is skipped when the time is up; records of a part that was cut cover the samples
that all policies have finished. The same command goes on where it stopped, as long as the output folder is there.
`--model FOLDER` is the model that experiments/tinyllama.py made (default: in its cache). `--tiny` runs everything at a
small size, to see that it works.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from books import split
from gguf_model import model_folder
from tinyllama import NAME, gguf_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import msrnn
from msrnn.budgets.by_head import calibrate_by_head
from msrnn.budgets.calibrate import Meter, Settings, chunks_of
from msrnn.budgets.profile import dump
from msrnn.eval import tasks
from msrnn.eval.experiment import make_experiment
from msrnn.eval.record import Record, write_records
from msrnn.eval.run import run

FEW = ("full", "tova", "window+4", "h2o", "fade")
BEST = ("best:256", "best:512")  # in the bytes of so many plain slots
CONTEXT = 2048
SIZES = (128, 256, 512)  # slots of a KV head on average, with the profile


class TimeIsUp(Exception):
    """A part's own limit, where it has no other way to stop."""


@dataclass
class Session:
    """What all parts share. `end` is when the last part must have ended."""

    model: Any
    tokenizer: Any
    options: argparse.Namespace
    end: float
    best: tuple[str, ...]
    name: str

    @property
    def out(self) -> Path:
        return Path(self.options.out) / f"{self.name}.jsonl"

    @property
    def profile(self) -> Path:
        return Path(f"{NAME}-heads.json")

    def left(self) -> float:
        return self.end - time.monotonic()

    def eval(self, limit: float, **table: Any) -> None:
        """One experiment, for at most `limit` seconds, into the records of the session."""
        if self.options.tiny:
            table |= {"limit": 2, "batch": 2}
        table = {"data": self.options.data} | table
        experiment = make_experiment(table, tasks.settings())
        if table["task"] == "pg19" and not self.options.tiny:
            experiment = replace(experiment, batch=self.options.batch)
        minutes = max(0.0, min(limit, self.left())) / 60
        show(run(experiment, self.model, self.tokenizer, self.out, minutes=minutes, quiet=True))


def show(records: list[Record]) -> None:
    """Perplexities, or the means over cells, one line per policy."""
    lines: dict[tuple[str, str], list[float]] = {}
    for record in records:
        lines.setdefault((record.policy, record.metric), []).append(record.value)
    for (policy, metric), values in lines.items():
        print(f"  {policy:34} {metric:16} {sum(values) / len(values):9.3f}  ({len(values)} cells)", flush=True)
    if not records:
        print("  no sample was done by every policy", flush=True)


def pg19(session: Session, limit: float) -> None:
    chunk = 256 if session.options.tiny else CONTEXT
    capacities = [64] if session.options.tiny else [64, 128, 256, 512, 1024]
    session.eval(limit, task="pg19", chunk=chunk, chunks_per_book=6, policies=list(FEW), capacities=capacities)


def pg19_more(session: Session, limit: float) -> None:
    """The other rows of the paper's table 3."""
    chunk = 256 if session.options.tiny else CONTEXT
    others = ["full", "baseline", "window", "window+1", "h2o-layer", "tova-head", "tova+1", "tova+4"]
    capacities = [64] if session.options.tiny else [64, 128, 256, 512, 1024]
    session.eval(limit, task="pg19", chunk=chunk, chunks_per_book=6, policies=others, capacities=capacities)


def profile(session: Session, limit: float) -> None:
    """A profile by KV head from the development half of the books; in float32, as it is made of small differences."""
    names = [book.name for book in split(Path(session.options.data))[0]]
    grid = (16, 64) if session.options.tiny else (16, 32, 64, 128, 256, 512, 1024)
    session.model.to(torch.float32)
    chunks = profile_chunks(session)
    meter = Meter(session.model, chunks, Settings("fade", grid, 0, len(chunks)), f"{session.profile}.measured.jsonl")
    meter.on_measured = partial(within, time.monotonic() + min(limit, session.left()))
    try:
        document = calibrate_by_head(meter, [64 if session.options.tiny else 256], {"names": names}, msrnn.__version__)
    finally:
        session.model.to(getattr(torch, session.options.dtype))
    session.profile.write_text(dump(document))
    print(f"  {document['losses']}", flush=True)


def profile_chunks(session: Session) -> torch.Tensor:
    """[N, T]: some chunks of each book of the development half, each after BOS."""
    books, _ = split(Path(session.options.data))
    length, each = (128, 1) if session.options.tiny else (CONTEXT, 2)
    bos = session.tokenizer("")["input_ids"]
    texts = [book.read_text(encoding="utf-8") for book in books[: 2 if session.options.tiny else None]]
    ids = [session.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    rows = torch.cat([chunks_of(one, length - len(bos), each) for one in ids])
    return torch.cat([torch.tensor(bos, dtype=rows.dtype).expand(len(rows), -1), rows], 1)


def with_profile(session: Session, *kinds: str) -> list[str]:
    if not session.profile.is_file():
        raise TimeIsUp("there is no profile yet")
    return [f"{kind},profile={session.profile}" for kind in kinds]


def pg19_profile(session: Session, limit: float) -> None:
    """PG-19 with the profile, and `best` with and without it."""
    sizes = [64] if session.options.tiny else SIZES
    policies = [*with_profile(session, *(f"fade:{size}" for size in sizes), *session.best), *session.best]
    chunk = 256 if session.options.tiny else CONTEXT
    session.eval(limit, task="pg19", chunk=chunk, chunks_per_book=6, policies=["full", *policies])


def recall_profile(session: Session, limit: float) -> None:
    """Needles, then facts in conversations, with the profile."""
    sizes = [64] if session.options.tiny else (256, 512)
    policies = ["full", *with_profile(session, *(f"fade:{size}" for size in sizes), *session.best)]
    session.eval(limit / 2, **NEEDLE | {"lengths": [256]} if session.options.tiny else NEEDLE, policies=policies)
    session.eval(limit / 2, **TURNS | {"turns": [0, 1]} if session.options.tiny else TURNS, policies=policies)


def within(deadline: float, description: str, loss: float) -> None:
    if time.monotonic() > deadline:
        raise TimeIsUp(f"calibration stopped at {description}")


def ruler(session: Session, limit: float, lengths: tuple[int, ...] = (1024, 2048), samples: int = 10) -> None:
    lengths, samples = ((1024,), 1) if session.options.tiny else (lengths, samples)
    large_first(session, limit, task="ruler", lengths=list(lengths), samples=samples, batch=120)


def babilong(session: Session, limit: float, lengths: tuple[int, ...] = (1024, 1984), samples: int = 20) -> None:
    lengths, samples = ((512,), 1) if session.options.tiny else (lengths, samples)
    large_first(session, limit, task="babilong", lengths=list(lengths), samples=samples, batch=120)


def large_first(session: Session, limit: float, **table: Any) -> None:
    """All policies in the bytes of 512 plain slots, then of 256, as far as the time allows."""
    end = time.monotonic() + limit
    for capacity, best in zip((512, 256) if len(session.best) > 1 else (128,), reversed(session.best), strict=True):
        session.eval(end - time.monotonic(), **table, policies=[*FEW, best], capacities=[capacity])


NEEDLE = {"task": "needle", "lengths": [1024, 2000], "repeats": 6, "batch": 60}
TURNS = {"task": "turns", "turns": [0, 2, 4, 7], "conversations": 30, "batch": 60}


def needle(session: Session, limit: float) -> None:
    table = NEEDLE | {"lengths": [256]} if session.options.tiny else NEEDLE
    session.eval(limit, **table, policies=list(FEW), capacities=[128] if session.options.tiny else [256, 512, 1024])


def turns(session: Session, limit: float) -> None:
    table = TURNS | {"turns": [0, 1]} if session.options.tiny else TURNS
    session.eval(limit, **table, policies=list(FEW), capacities=[128] if session.options.tiny else [256, 512, 1024])


def documents(task: str, new_tokens: int, session: Session, limit: float) -> None:
    """QASPER or SQuALITY, cut to the model's context with the answer; 512 slots first, as far as the time allows."""
    context = 512 if session.options.tiny else CONTEXT - new_tokens
    new, end = 8 if session.options.tiny else new_tokens, time.monotonic() + limit
    table = {"task": task, "context": context, "new_tokens": new, "policies": list(FEW), "batch": 64}
    for capacity in [128] if session.options.tiny else [512, 256, 1024]:
        session.eval(end - time.monotonic(), **table, capacities=[capacity])


def story(session: Session, limit: float) -> None:
    new, end = 16 if session.options.tiny else 1536, time.monotonic() + limit
    for policies in (["full", "tova:512", "window+4:512"], ["full", "fade:512", "tova:256"]):
        left = end - time.monotonic()
        session.eval(left, task="story", stories=50, new_tokens=new, policies=policies, batch=50)


def extrapolation(session: Session, limit: float) -> None:
    """Past the trained length, with plain positions and compressed gaps; float32, for keys are re-rotated often."""
    session.model.to(torch.float32)
    length = 512 if session.options.tiny else 16384
    policies = ["full", "window+4:512", "tova:512", "fade:512"]
    session.eval(
        limit, task="extrapolation", length=length, bin=length // 16, positions=["gaps", "plain"], books=8, batch=8,
        policies=policies, full_tokens=length // 2,
    )  # fmt: skip
    session.model.to(getattr(torch, session.options.dtype))


def retention(session: Session, limit: float) -> None:
    from msrnn.analysis.measure import measure

    paths = sorted(Path(session.options.data, "pg19").glob("*.txt"))[: 1 if session.options.tiny else 8]
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    length, policies = (256, ["tova:64"]) if session.options.tiny else (CONTEXT, ["tova:256", "fade:256"])
    records = measure(session.model, session.tokenizer, texts, policies, length=length)
    write_records(session.out, records)
    print(f"  {len(records)} records", flush=True)


PARTS: dict[str, tuple[float, Callable[[Session, float], None]]] = {
    "pg19": (100, pg19),
    "ruler": (150, ruler),
    "profile": (150, profile),
    "pg19_profile": (90, pg19_profile),
    "recall_profile": (80, recall_profile),
    "needle": (40, needle),
    "turns": (60, turns),
    "qasper": (90, partial(documents, "qasper", 128)),
    "babilong": (60, babilong),
    "story": (240, story),
    "retention": (40, retention),
    "extrapolation": (90, extrapolation),
    "squality": (150, partial(documents, "squality", 384)),
    "pg19_more": (120, pg19_more),
}
SMOLLM = {
    "smollm_ruler": (300.0, partial(ruler, lengths=(1024, 2048, 4096), samples=10)),
    "smollm_babilong": (150.0, partial(babilong, lengths=(1024, 2048, 4096), samples=20)),
}


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The converted model, under its own name wherever its folder is."""
    folder = options.model or str(model_folder(gguf_file()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=options.dtype)
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.name_or_path = NAME
    return model.to(options.device).eval(), tokenizer


@contextmanager
def announced(name: str, session: Session) -> Iterator[None]:
    """An error of one part is printed, and the next part goes on."""
    start = time.monotonic()
    print(f"== {name} ({session.left():.0f} s left)", flush=True)
    try:
        yield
    except TimeIsUp as stop:
        print(f"  {stop}", flush=True)
    except Exception:
        traceback.print_exc(limit=-4, file=sys.stdout)
    print(f"   {name}: {time.monotonic() - start:.1f} s", flush=True)


def parser_of(about: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """The options of scripts that run parts of an evaluation of TinyLlama."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="a folder with pg19, qasper and squality")
    parser.add_argument("--out", required=True, help="a folder for records")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--only", nargs="+", choices=parts, help="these parts, in this order")
    parser.add_argument("--model", help="the folder that experiments/tinyllama.py made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=42, help="chunks of PG-19 at once")
    parser.add_argument("--tiny", action="store_true")
    return parser


def enter_folder(options: argparse.Namespace) -> float:
    """Work in the folder for records, so that a profile's name in them has no folder; when the time is up."""
    end = time.monotonic() + options.seconds
    Path(options.out).mkdir(parents=True, exist_ok=True)
    for name in ("data", "out", "model"):
        path = getattr(options, name)
        setattr(options, name, path and str(Path(path).expanduser().resolve()))
    os.chdir(options.out)
    return float(end)


def main() -> None:
    options = parser_of(__doc__, [*PARTS, *SMOLLM]).parse_args()
    end = enter_folder(options)
    names = options.only or list(PARTS)
    own = [name for name in names if name in PARTS]
    others = [name for name in names if name in SMOLLM]
    best = ("best:32",) if options.tiny else BEST
    for parts, loader, label in ((own, load, "tinyllama"), (others, load_smollm, "smollm")):
        if not parts or time.monotonic() > end:
            continue
        start = time.monotonic()
        session = Session(*loader(options), options, end, best, label)
        print(f"{label} loaded in {time.monotonic() - start:.1f} s", flush=True)
        for name in parts:
            if session.left() < 5:
                print(f"== {name}: no time left", flush=True)
                continue
            limit, part = (PARTS | SMOLLM)[name]
            with announced(name, session):
                part(session, limit)


def load_smollm(options: argparse.Namespace) -> tuple[Any, Any]:
    return msrnn.load(None, dtype=options.dtype, device=options.device)


if __name__ == "__main__":
    main()
