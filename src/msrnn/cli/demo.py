"""`make demo`: one long text through the plain model and through a bounded state, side by side.

Prints a table, asks both a question on the text, and draws what the bounded layers kept. Every number is measured
here and now; the only thing fixed beforehand is the text, which comes with Python.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from ..analysis.figures import layers_holding, retention_map, visible
from ..budgets.profile import check_model
from ..core.trace import Trace
from ..eval.perplexity import Progress, new_cache, score
from ..hf.cache import BoundedCache, geometry
from ..hf.chat_template import split_template
from ..hf.cost import Peak, cost, human
from ..hf.load import load
from ..policy import Plan, plan, profile_path, split_profile
from ..rnn import PIECE, RNN
from ..system.text import read_blocks
from ..system.tokenization import stream_tokens

POLICIES = ("full", "tova:256")
PROFILED = "tova:256,profile=SmolLM2-135M-Instruct"  # joins them where the bundled model is read
LENGTH = 4096
TOPICS = ("exceptions", "naming", "objects", "raise", "with")  # of `help()`; no two say the same
QUESTION = 'According to the text, what is the "with" statement used for?'
ANSWER = 64
COLUMNS = ("policy", "tokens read", "tokens held", "KV bytes", "peak memory", "tokens/s", "perplexity")
NOTES = """\
Tokens held: per layer, on average where layers differ. KV bytes: keys and values held at the end. Peak memory: how far
this process rose above the loaded model while it read in pieces of {piece} tokens, without scoring. Tokens/s: of that
reading. Perplexity: of the text, every token predicted from what was held before it. full is the model as transformers
runs it, with its own growing cache; a profile gives every layer a capacity of its own at the same total.
Measured here and now: {here}."""
NEXT = """\
{seconds:.0f} seconds in all. Next: msrnn chat, msrnn generate --help, msrnn info, or ask about the first chapter, which
a small state let go long ago: python -m msrnn.cli.demo --question "According to the text, what is an exception?\""""


@dataclass(frozen=True)
class Row:
    """One policy's measurements, and what it answered."""

    policy: str
    read: int
    held: int
    bytes: int
    peak: int
    seconds: float
    perplexity: float
    answer: str

    @property
    def cells(self) -> list[str]:
        speed, size, peak = f"{self.read / self.seconds:,.0f}", human(self.bytes), human(self.peak)
        return [self.policy, f"{self.read:,}", f"{self.held:,}", size, peak, speed, f"{self.perplexity:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    try:
        _run(options)
    except (ValueError, OSError) as error:
        print(f"msrnn demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m msrnn.cli.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a hub name, a folder or a .gguf file (default: the small bundled model)")
    parser.add_argument("--device", help="where it runs, e.g. cuda (default: the CPU)")
    parser.add_argument("--policy", action="append", help=f"one row each (default: {' '.join(POLICIES)})")
    parser.add_argument("--text", type=Path, help="a text file of your own instead of Python's documentation")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"tokens of it to read (default: {LENGTH})")
    parser.add_argument("--question", default=QUESTION, help="asked when the text is read (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("msrnn-demo.png"), help="the picture (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON and nothing else")
    return parser.parse_args(argv)


def _run(options: argparse.Namespace) -> None:
    say = (lambda *_: None) if options.json else print
    if not options.out.parent.is_dir():
        raise ValueError(f"{options.out.parent} is not a folder; make it first or choose another --out")
    began = time.perf_counter()
    model, tokenizer = load(options.model, device=options.device)
    talk = Talk.of(tokenizer, blocks(options.text), options.length, options.question)
    plans = _plans(model, options.policy or _policies(options.model), len(talk.read))
    say(_promise(model, talk, plans, options.text))
    rows: list[Row] = []
    trace = None
    for policy, made in plans.items():
        row, traced = measure(model, tokenizer, talk, policy, made)
        rows.append(row)
        trace = trace or traced
    picture = _draw(trace, tokenizer, options.out)
    say(table(rows))
    say(f"\n{NOTES.format(piece=PIECE, here=_here(model))}\n")
    say(_answers(options.question, rows))
    if trace is not None:
        say(_kept(trace, tokenizer))
    say(f"\nThe picture: {picture}" if picture else "\nNo picture: pip install 'msrnn[plot]' for one.")
    say(NEXT.format(seconds=time.perf_counter() - began))
    if options.json:
        about = {"model": _name(model), "seconds": time.perf_counter() - began, "picture": picture and str(picture)}
        print(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1))


def blocks(path: Path | None = None) -> Iterable[str]:
    """A long real text that every Python has: chapters of its own documentation, without their underlines."""
    if path is not None:
        return read_blocks(path)
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python has no pydoc_data to read; give a text with --text FILE") from error
    chapters = [topics[name].strip() for name in TOPICS if name in topics]
    return [re.sub(r"\n[*=~-]{3,}\n", "\n", "\n\n\n".join(chapters))]


@dataclass(frozen=True)
class Talk:
    """A user's turn as token ids: what opens it, a text, and a question that closes it."""

    before: list[int]
    text: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: Any, blocks: Iterable[str], length: int, question: str) -> Talk:
        """Opening and text together take `length` tokens, or fewer where the text is short."""
        opening, closing = split_template(tokenizer, default=("", "\nAnswer:"))
        before = tokenizer(opening, add_special_tokens=not opening).input_ids
        text = list(islice(stream_tokens(tokenizer, blocks, special=False), max(length - len(before), 0)))
        if len(text) < 2:
            raise ValueError(f"there are {len(text)} tokens of text to read; give more text or a greater --length")
        return cls(before, text, tokenizer(f"\n\n{question}{closing}", add_special_tokens=False).input_ids)

    @property
    def read(self) -> list[int]:
        return self.before + self.text


def _policies(model: str | None) -> tuple[str, ...]:
    """The bundled model has a profile of its own, which comes with the package."""
    profile = split_profile(PROFILED)[1] or ""
    return (*POLICIES, PROFILED) if model is None and profile_path(profile).is_file() else POLICIES


def _plans(model: PreTrainedModel, policies: Sequence[str], length: int) -> dict[str, Plan]:
    """Every policy, by the name it has in the table, as one per layer; a fraction is of the text's length."""
    layers, plans = geometry(model), dict[str, Plan]()
    slot = sum(layer.slot_bytes(model.dtype) for layer in layers)
    for policy in policies:
        name, profile = split_profile(policy)
        if profile:
            check_model(profile, model)
        plans[f"{name} + profile" if profile else name] = plan(policy, len(layers), length=length, slot_bytes=slot)
    return plans


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, talk: Talk, policy: str, made: Plan
) -> tuple[Row, Trace | None]:
    """Read once for time and memory, once more to score, and ask; a bounded state's second reading is traced.

    `full` is not our policy of that name here but the plain model, the opponent.
    """
    ids, bound = talk.read, None if policy == "full" else made
    with ThreadPoolExecutor(1) as once:  # a thread of its own, which takes its scratch memory with it
        once.submit(_read, model, ids[: 2 * PIECE], new_cache(model, bound)).result()  # nothing is compiled on the clock
    into = new_cache(model, bound)
    _settle()
    with _bar(f"{policy}: reading", len(ids)) as progress, Peak(model.device) as peak:
        started = time.perf_counter()
        _read(model, ids, into, progress)
        seconds = time.perf_counter() - started
    held, size = _held(into), nbytes(into)
    state = None if bound is None else RNN(model, bound).start(trace=True)
    into = new_cache(model) if state is None else state.cache
    with _bar(f"{policy}: scoring", len(ids)) as progress:
        if talk.before:
            _read(model, talk.before, into, progress)
        found = score(model, talk.text, into, progress=progress)
    trace = None if state is None else state.trace
    if trace is not None:
        trace.tokens = torch.tensor([ids])
    answer = _ask(model, tokenizer, talk, into)
    return Row(policy, len(ids), held, size, peak.bytes, seconds, found.perplexity, answer), trace


@torch.no_grad()
def _read(model: PreTrainedModel, ids: list[int], into: Cache, progress: Progress | None = None) -> None:
    """Both opponents the same way: in pieces, with the logits of the last token only."""
    for piece in torch.split(torch.tensor([ids], device=model.device), PIECE, 1):
        logits = model(piece, past_key_values=into, use_cache=True, logits_to_keep=1).logits
        logits[0, 0, 0].item()  # waits for a GPU, as whoever uses them would
        if progress is not None:
            progress(piece.shape[1])


def _held(made: Cache) -> int:
    """Tokens per layer, on average where the layers differ."""
    if not isinstance(made, BoundedCache):
        return int(made.get_seq_length())
    each = [int(layer.state.held.max()) for layer in made.bounded if layer.state is not None]
    return round(sum(each) / len(each))


def nbytes(made: Cache) -> int:
    """Bytes of the keys and values a cache holds (and of a bounded one's positions and scores)."""
    if isinstance(made, BoundedCache):
        return made.nbytes
    parts = [part for layer in made.layers for part in (layer.keys, layer.values) if part is not None]
    return sum(part.numel() * part.element_size() for part in parts)


def _settle() -> None:
    """Give freed memory back to the system, so that every run starts from the same level."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others may not
        if trim is not None:
            trim(0)


@contextmanager
def _bar(name: str, total: int) -> Iterator[Progress]:
    with tqdm(total=total, desc=name, unit=" tokens", leave=False, file=sys.stderr) as bar:
        yield bar.update


def _ask(model: Any, tokenizer: Any, talk: Talk, into: Cache) -> str:
    """The answer, up to its last whole sentence."""
    whole = torch.tensor([talk.read + talk.after], device=model.device)
    options = {"max_new_tokens": ANSWER, "do_sample": False, "attention_mask": torch.ones_like(whole)}
    written = model.generate(whole, past_key_values=into, **options)[0, whole.shape[1] :]
    answer = " ".join(tokenizer.decode(written, skip_special_tokens=True).split())
    sentences = re.match(r".*[.!?](?=\s|$)", answer)
    return sentences[0] if sentences else answer


def _promise(model: PreTrainedModel, talk: Talk, plans: dict[str, Plan], source: Path | None) -> str:
    """What will happen, and what each state will cost, before anything is read."""
    layers, wide, length = geometry(model), max(map(len, plans)), len(talk.read)
    text = source or "Python's own documentation"
    lines = [f"{_name(model)} reads {length:,} tokens of {text} under each policy: once for time, once to score."]
    for policy, made in plans.items():
        price = cost(layers, made, model.dtype, length)
        does = f"keeps every token: {human(price.full)} at the end, and growing"
        if made.average is not None:
            does = f"keeps {_sizes(made)}: {human(price.state)}, whatever the length"
        lines.append(f"  {policy:{wide}}  {does}")
    return "\n".join(lines) + "\n"


def _sizes(made: Plan) -> str:
    if made.uniform:
        return f"{made.average:g} tokens in every layer"
    sizes = [policy.capacity or 0 for policy in made.policies]
    return f"{min(sizes):,} to {max(sizes):,} tokens in a layer, {made.average:g} on average"


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, names to the left and numbers to the right."""
    cells = [list(COLUMNS), *(row.cells for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells]
    return "\n".join("  ".join(line) for line in lines)


def _answers(question: str, rows: Sequence[Row]) -> str:
    wide = max(len(row.policy) for row in rows) + 2
    said = [_wrapped(f"  {row.policy:{wide}}{row.answer}", wide + 2) for row in rows]
    return "\n".join([f"Then asked: {question}", *said])


def _kept(trace: Trace, tokenizer: Any) -> str:
    """What is still held of the text's first half."""
    assert trace.tokens is not None
    half = layers_holding(trace, trace.length - 1)[: trace.length // 2]
    best = [place for place in half.argsort(descending=True, stable=True)[:8].tolist() if half[place] > 0]
    words = [f"{visible(tokenizer.decode([int(trace.tokens[0, i])]))} at {i} ({half[i]:g} layers)" for i in best]
    held = f"Some layer of {trace.policy} still holds {int((half > 0).sum()):,} of the first {len(half):,} tokens"
    return "\n" + _wrapped(f"{held}, most widely {', '.join(words)}.", 2) if words else ""


def _draw(trace: Trace | None, tokenizer: Any, out: Path) -> Path | None:
    """The picture, where there is a trace and matplotlib."""
    if trace is None or trace.tokens is None or importlib.util.find_spec("matplotlib") is None:
        return None
    return retention_map(trace, out, tokens=[tokenizer.decode([token]) for token in trace.tokens[0].tolist()])


def _wrapped(line: str, indent: int) -> str:
    return textwrap.fill(line, 118, subsequent_indent=" " * indent, drop_whitespace=True)


def _name(model: PreTrainedModel) -> str:
    return Path(model.config.name_or_path).name or str(model.config.model_type)


def _here(model: PreTrainedModel) -> str:
    """The conditions, to stand beside the numbers."""
    kind = str(model.dtype).removeprefix("torch.")
    where = f"threads: {torch.get_num_threads()}" if model.device.type == "cpu" else torch.cuda.get_device_name()
    return f"{kind} on {model.device.type}, {where}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
