"""`make demo`: one long text under the plain model and under bounded states, side by side.

Prints a table, asks each a question about the text, and draws what the bounded layers kept. Every number is measured
when it runs; the text comes with Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..analysis.figures import layers_holding, retention_map, visible
from ..budgets.profile import plan_for
from ..core.trace import Trace
from ..hf.best import resolve
from ..hf.cost import cost
from ..hf.geometry import geometry
from ..hf.load import load
from ..plan import Plan
from ..policy import split_policy
from ..rnn import PIECE
from ..system import console
from ..system.extras import install
from ..system.sizes import human
from ..system.text import read_blocks
from .argument_parser import Parser
from .demo_measure import Row, Turn, measure
from .errors import one_line
from .options import check_output_file, inputs

POLICIES = ("full", "tova:256", "best:256")
LENGTH = 4096
TOPICS = ("exceptions", "naming", "objects", "raise", "with")  # of `help()`; they do not repeat each other
QUESTION = 'According to the text, what is the "with" statement used for?'
_PICTURES = (".png", ".svg", ".pdf", ".jpg")
HEADER = ("policy", "tokens read", "tokens held", "KV bytes", "peak memory", "tokens/s", "perplexity")
NOTES = """\
Tokens held: per layer, on average where layers or KV heads differ. KV bytes: the state at the end. Peak memory: how far
this process rose above the loaded model during prefill in pieces of {piece} tokens. Tokens/s: of that prefill.
Perplexity: of the text, every token predicted from what was held before it. full is the model as transformers runs it,
with its own growing cache; best keeps more tokens in the bytes of tova: fewer bits a number, and slots where they help
most. Measured here and now: {conditions}."""
NEXT = """\
{seconds:.0f} seconds in all. Next: msrnn chat, msrnn generate --help, msrnn info, or ask about the first chapter, which
a small state has forgotten: python -m msrnn.cli.demo --question "According to the text, what is an exception?\""""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    options = _parse_options(argv)
    try:
        _run(options)
    except (ValueError, OSError) as error:
        print(f"msrnn demo: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m msrnn.cli.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a hub name, a folder or a .gguf file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", help="where it runs, e.g. cuda (default: the CPU)")
    parser.add_argument("--policy", action="append", help=f"one row each (default: {' '.join(POLICIES)})")
    parser.add_argument("--text", type=Path, help="a text file of your own instead of Python's documentation")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"tokens of it to read (default: {LENGTH})")
    parser.add_argument("--question", default=QUESTION, help="asked after the text (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("msrnn-demo.png"), help="the picture (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON and nothing else")
    return parser.parse_args(argv)


def _run(options: argparse.Namespace) -> None:
    _check_files(options)
    start = time.perf_counter()
    model, tokenizer = load(options.model, device=options.device)
    turn = Turn.tokenize(tokenizer, text_blocks(options.text), options.length, options.question)
    plans = _plans(model, options.policy or POLICIES, len(turn.context))
    if not options.json:
        print(_announcement(model, turn, plans, options.text))
    results = [measure(model, tokenizer, turn, name, policies) for name, policies in plans.items()]
    rows = [row for row, _ in results]
    trace = next((trace for _, trace in results if trace is not None), None)
    picture = _draw(trace, tokenizer, options.out)
    seconds = time.perf_counter() - start
    if options.json:
        about = {"model": _name(model), "seconds": seconds, "picture": picture and str(picture)}
        print(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1))
        return
    print(table(rows))
    print(f"\n{NOTES.format(piece=PIECE, conditions=_conditions(model))}\n")
    print(_answers(options.question, rows))
    if trace is not None:
        print(_oldest_held(trace, tokenizer))
    print(f"\nThe picture: {picture}" if picture else f"\nNo picture: {_why_none(trace)}.")
    print(NEXT.format(seconds=seconds))


def _check_files(options: argparse.Namespace) -> None:
    """Refuse a text and a picture that cannot be, before anything is measured."""
    if options.text and not options.text.is_file():
        raise ValueError(f"there is no file {options.text}; check --text")
    check_output_file(options.out, "--out", inputs(options))
    if options.out.suffix.lower() not in ("", *_PICTURES):
        raise ValueError(f"--out {options.out} is no picture; give a name that ends in {', '.join(_PICTURES)}")


def text_blocks(path: Path | None = None) -> Iterable[str]:
    """The text: the file, or a long real text that every Python has, chapters of its own documentation."""
    if path is not None:
        return read_blocks(path)
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python has no pydoc_data to read; give a text with --text FILE") from error
    chapters = [topics[name].strip() for name in TOPICS if name in topics]
    return [re.sub(r"\n[*=~-]{3,}\n", "\n", "\n\n\n".join(chapters))]  # without underlines of headings


def _plans(model: PreTrainedModel, policies: Sequence[str], length: int) -> dict[str, Plan]:
    """The plan of every policy, by its name in the table; a fraction is of the text's length."""
    layers, plans = geometry(model), dict[str, Plan]()
    for policy in policies:
        text = split_policy(policy)
        name = f"{text.policy} + profile" if text.profile else text.policy
        resolved = resolve(policy, model, length=length)
        plans[name] = plan_for(resolved, len(layers), length=length)
    return plans


def _announcement(model: PreTrainedModel, turn: Turn, plans: dict[str, Plan], source: Path | None) -> str:
    """What will be measured, and what each state will cost."""
    layers, width, length = geometry(model), max(map(len, plans)), len(turn.context)
    text = source or "Python's own documentation"
    lines = [f"{_name(model)} reads {length:,} tokens of {text} under each policy: once for time, once to score."]
    for name, policies in plans.items():
        predicted = cost(layers, policies, model.dtype, length)
        keeps = f"keeps every token: {human(predicted.full)} at the end, and growing"
        if policies.average is not None:
            keeps = f"keeps {_capacities(policies)}: {human(predicted.state)}, whatever the length"
        lines.append(f"  {name:{width}}  {keeps}")
    return "\n".join(lines) + "\n"


def _capacities(policies: Plan) -> str:
    sizes, each = [policy.capacity or 0 for policy in policies.parts], "KV head" if policies.by_head else "layer"
    if min(sizes) == max(sizes):
        return f"{sizes[0]} tokens in every {each}"
    return f"{min(sizes):,} to {max(sizes):,} tokens in a {each}, {policies.average:g} on average"


def table(rows: Iterable[Row]) -> str:
    """The measurements as aligned text."""
    return console.table(map(_cells, rows), HEADER)


def _cells(row: Row) -> tuple[object, ...]:
    speed, perplexity = f"{row.read / row.seconds:,.0f}", f"{row.perplexity:.2f}"
    return row.policy, row.read, row.held, human(row.bytes), human(row.peak), speed, perplexity


def _answers(question: str, rows: Sequence[Row]) -> str:
    width = max(len(row.policy) for row in rows) + 2
    answers = [_wrap(f"  {row.policy:{width}}{row.answer}", width + 2) for row in rows]
    return "\n".join([f"Then asked: {question}", *answers])


def _oldest_held(trace: Trace, tokenizer: Any) -> str:
    """Which tokens of the text's first half are still held."""
    assert trace.tokens is not None
    half = layers_holding(trace, trace.length - 1)[: trace.length // 2]
    best = [place for place in half.argsort(descending=True, stable=True)[:8].tolist() if half[place] > 0]
    words = [f"{visible(tokenizer.decode([int(trace.tokens[0, i])]))} at {i} ({half[i]:.3g} layers)" for i in best]
    held = f"Some layer of {trace.policy} still holds {int((half > 0).sum()):,} of the first {len(half):,} tokens"
    return "\n" + _wrap(f"{held}, most widely {', '.join(words)}.", 2) if words else ""


def _draw(trace: Trace | None, tokenizer: Any, out: Path) -> Path | None:
    """The picture, where there is a trace and matplotlib."""
    if trace is None or trace.tokens is None or importlib.util.find_spec("matplotlib") is None:
        return None
    return retention_map(trace, out, tokens=[tokenizer.decode([token]) for token in trace.tokens[0].tolist()])


def _why_none(trace: Trace | None) -> str:
    if trace is None:
        return "no policy here is bounded"
    return f"matplotlib is not installed here; for one, {install('plot')}"


def _wrap(line: str, indent: int) -> str:
    return textwrap.fill(line, 118, subsequent_indent=" " * indent, drop_whitespace=True)


def _name(model: PreTrainedModel) -> str:
    return Path(model.config.name_or_path).name or str(model.config.model_type)


def _conditions(model: PreTrainedModel) -> str:
    """dtype, device and torch, to stand beside the numbers."""
    dtype = str(model.dtype).removeprefix("torch.")
    device = f"threads: {torch.get_num_threads()}" if model.device.type == "cpu" else torch.cuda.get_device_name()
    return f"{dtype} on {model.device.type}, {device}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
