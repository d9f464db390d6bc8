"""`msrnn trace`: read a text and write down which tokens each layer kept, and for how long."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..system.tokenization import stream_tokens
from . import options
from .prompt import feed, open_source
from .session import announce, note, open_rnn, warn_beyond

if TYPE_CHECKING:
    from ..core.trace import Trace
    from ..rnn import RNN

_ABOUT = """\
Read a text and write a trace: for every token the step after which it left, per layer. The file is a safetensors file
that msrnn.Trace.load reads. A short table says what each layer held at the end.
"""
_MORE = """\
examples:
  msrnn trace -f book.txt -o trace.safetensors
  msrnn trace -f book.txt --max-tokens 5000 --policy h2o:256 -o h2o.safetensors --json
  echo "To be, or not to be" | msrnn trace --policy tova:4 -o small.safetensors

  trace = msrnn.Trace.load("trace.safetensors")
  trace.held(layer=3, step=100)    # which tokens layer 3 held after step 100
"""


def add(commands: options.Commands[options.Parser]) -> None:
    parser = commands.add_parser("trace", help="which tokens each layer kept", description=_ABOUT, epilog=_MORE)
    options.add_input(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="where the trace goes")
    parser.add_argument("--max-tokens", type=options.whole(1), metavar="N", help="read so many tokens at most")
    options.add_policy(parser)
    options.add_prompt_mode(parser)
    options.add_model(parser)
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    options.check_policy(arguments)
    _check_output(Path(arguments.output))
    source = open_source(arguments)
    rnn, tokenizer = open_rnn(arguments)
    total = source.estimate(tokenizer)
    if arguments.max_tokens:
        total = min(total or arguments.max_tokens, arguments.max_tokens)
    if not arguments.quiet:
        announce(rnn, total)
    ids = islice(stream_tokens(tokenizer, source.blocks), arguments.max_tokens)
    trace = _read(rnn, ids, total, arguments.quiet)
    trace.notes = {"prompt mode": rnn.prompt, "source": source.name}
    trace.save(arguments.output)
    if not arguments.quiet:
        warn_beyond(rnn, trace.length)
        note(f"trace of {trace.length:,} tokens in {arguments.output}")
    _show(trace, arguments)


def _check_output(path: Path) -> None:
    """Refuse a place that cannot be written to now, not after hours of reading."""
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--output {path}: the folder {path.parent} cannot be written to; choose another")


def _read(rnn: RNN, ids: Iterator[int], total: int | None, quiet: bool) -> Trace:
    import torch

    from ..rnn import pieces

    read = array("i")

    def noted() -> Iterator[list[int]]:
        for piece in pieces(ids, rnn.piece) if rnn.prompt == "recurrent" else [list(ids)]:
            read.extend(piece)
            yield piece

    _, state = feed(rnn, noted(), rnn.start(trace=True), total=total, quiet=quiet)
    trace = state.trace
    trace.tokens = torch.tensor([read], dtype=torch.long)
    return trace


def _show(trace: Trace, arguments: Namespace) -> None:
    layers = [_summary(trace, layer) for layer in range(len(trace.deaths))]
    if arguments.json:
        about = {"file": arguments.output, "tokens": trace.length, "policy": trace.policy, "model": trace.model}
        print(json.dumps(about | {"layers": layers}))
        return
    print("layer   held  recent  first token  oldest kept")
    for layer in layers:
        first = "kept" if layer["first"] == 1 else "gone" if layer["first"] == 0 else f"kept by {layer['first']:.0%}"
        print(f"{layer['layer']:5}  {layer['held']:5,}  {layer['recent']:6.0%}  {first:>11}  {layer['oldest']:11,}")
    print("recent: the share of the held tokens that stand in the newer half of the text")


def _summary(trace: Trace, layer: int) -> dict[str, Any]:
    """What a layer holds at the end; where it has several units, the fullest, and means over them."""
    held = trace.held(layer, trace.length - 1)[0]  # [U, T]
    newer = held[:, trace.length // 2 :].sum() / held.sum()
    return {
        "layer": layer,
        "held": int(held.sum(1).max()),
        "recent": round(float(newer), 4),
        "first": round(float(held[:, 0].float().mean()), 4),
        "oldest": int(held.any(0).int().argmax()),
    }
