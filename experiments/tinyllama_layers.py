"""TinyLlama with a profile by layer: measured on the choosing half of the books, reported on the other.

    python experiments/tinyllama_layers.py --data FOLDER --out FOLDER --seconds 180 [--model FOLDER] [--tiny]

The profile goes to OUT/TinyLlama-1.1B-Chat.json; then PG-19 on the held-out books, passkeys and numbers, RULER at
2,048 tokens, with `tova` and `fade`, with and without it. Most valuable first; the same command resumes.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch
from books import split
from tinyllama import NAME
from tinyllama_gpu import (
    CONTEXT,
    NEEDLE,
    Session,
    TimeIsUp,
    announced,
    enter_folder,
    load,
    parser_of,
    profile_chunks,
    within,
)

import msrnn
from msrnn.budgets.calibrate import Meter, Settings, calibrate
from msrnn.budgets.profile import dump

PROFILE = Path(f"{NAME}.json")
GRID = (32, 128, 512, 1024)
AVERAGES = (256, 128, 512)


def profile(session: Session, limit: float) -> None:
    """Curves of single layers in float32, as they are small differences; a GPU multiplies in TF32."""
    if PROFILE.is_file():
        return
    tiny = session.options.tiny
    grid, averages = ((16, 64), (32,)) if tiny else (GRID, AVERAGES)
    chunks = profile_chunks(session)[:: 1 if tiny else session.options.every]
    session.model.to(torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = True
    meter = Meter(session.model, chunks, Settings("fade", grid, 0, len(chunks)), f"{PROFILE}.measured.jsonl")
    meter.on_measured = partial(within, time.monotonic() + min(limit, session.left()))
    names = [book.name for book in split(Path(session.options.data))[0]]
    try:
        document = calibrate(meter, averages, {"names": names}, msrnn.__version__)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        session.model.to(getattr(torch, session.options.dtype))
    PROFILE.write_text(dump(document))
    print(f"  {document['losses']}", flush=True)


def with_and_without(*policies: str) -> list[str]:
    if not PROFILE.is_file():
        raise TimeIsUp("there is no profile yet")
    return ["full", *policies, *(f"{policy},profile={PROFILE}" for policy in policies)]


def pg19(session: Session, limit: float) -> None:
    """Perplexity on the books that took no part, one capacity after the other."""
    held_out = Path("held_out")
    (held_out / "pg19").mkdir(parents=True, exist_ok=True)
    for book in split(Path(session.options.data))[1]:
        link = held_out / "pg19" / book.name
        if not link.exists():
            link.symlink_to(book)
    end = time.monotonic() + limit
    for size in (64,) if session.options.tiny else AVERAGES:
        table = {"task": "pg19", "chunk": 256 if session.options.tiny else CONTEXT, "chunks_per_book": 6}
        table |= {"policies": with_and_without(f"tova:{size}", f"fade:{size}"), "data": str(held_out.resolve())}
        session.eval(end - time.monotonic(), **table)


def recall(session: Session, limit: float) -> None:
    sizes = (64,) if session.options.tiny else (512, 256)
    table = NEEDLE | {"lengths": [256]} if session.options.tiny else NEEDLE
    for size in sizes:
        session.eval(limit / len(sizes), **table, policies=with_and_without(f"tova:{size}", f"fade:{size}"))


def ruler(session: Session, limit: float) -> None:
    """Without the profile the figures are there already."""
    size, length = (128, 1024) if session.options.tiny else (512, 2048)
    policies = with_and_without(f"fade:{size}", f"tova:{size}")[3:]
    session.eval(limit, task="ruler", lengths=[length], samples=10, batch=120, policies=policies)


PARTS = {"profile": (120.0, profile), "pg19": (90.0, pg19), "recall": (50.0, recall), "ruler": (90.0, ruler)}


def main() -> None:
    parser = parser_of(__doc__, list(PARTS))
    parser.add_argument("--every", type=int, default=2, help="of two chunks of each book, every one or every other")
    options = parser.parse_args()
    end = enter_folder(options)
    session = Session(*load(options), options, end, (), "tinyllama_layers")
    for name in options.only or PARTS:
        if session.left() > 5:
            with announced(name, session):
                PARTS[name][1](session, PARTS[name][0])


if __name__ == "__main__":
    main()
