"""`msrnn trace`: read a text and record which tokens each layer kept, and for how long."""

from __future__ import annotations

import json
from argparse import Namespace
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..system.console import note, table
from ..system.tokenization import stream_tokens
from . import options
from .argument_parser import Commands, integer
from .prefill import prefill
from .prompt import open_prompt
from .session import announce_cost, load_rnn, warn_beyond_context

if TYPE_CHECKING:
    from ..core.trace import Trace
    from ..rnn import RNN

_ABOUT = """\
Read a text and write a trace: for every token the step after which it was evicted, per layer. The file is a
safetensors file that msrnn.Trace.load reads. A short table says what each layer held at the end.
"""
_EXAMPLES = """\
examples:
  msrnn trace -f book.txt -o trace.safetensors
  msrnn trace -f book.txt --max-tokens 5000 --policy h2o:256 -o h2o.safetensors --json
  msrnn trace -f book.txt --policy tova:256 --html run.html
  echo "To be, or not to be" | msrnn trace --policy tova:4 -o small.safetensors

  trace = msrnn.Trace.load("trace.safetensors")
  trace.held(layer=3, step=100)    # which tokens layer 3 held after step 100
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser("trace", help="which tokens each layer kept", description=_ABOUT, epilog=_EXAMPLES)
    options.add_input(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="where the trace goes")
    parser.add_argument(
        "--html", metavar="FILE", help="also write a page that plays the run: text, layers, scores, perplexity"
    )
    parser.add_argument("--max-tokens", type=integer(1), metavar="N", help="read N tokens at most")
    options.add_policy(parser)
    options.add_prompt_mode(parser)
    options.add_model(parser)
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    options.check_policy(arguments)
    if not (arguments.output or arguments.html):
        raise ValueError("one of these is required: -o/--output FILE, --html FILE")
    files = options.inputs(arguments)
    for option, path in (("--output", arguments.output), ("--html", arguments.html)):
        if path:
            files.append(options.Input(option, options.check_output_file(path, option, files)))
    prompt = open_prompt(arguments)
    rnn, tokenizer = load_rnn(arguments)
    total = prompt.estimate_tokens(tokenizer)
    if arguments.max_tokens:
        total = min(total or arguments.max_tokens, arguments.max_tokens)
    if not arguments.quiet:
        announce_cost(rnn, total)
    ids = islice(stream_tokens(tokenizer, prompt.blocks), arguments.max_tokens)
    if arguments.html:
        from ..play.export import write_page

        trace = write_page(arguments.html, rnn, tokenizer, ids, total=total, quiet=arguments.quiet)
    else:
        trace = _trace(rnn, ids, total, arguments.quiet)
    trace.notes = {"prompt mode": rnn.prompt, "source": prompt.name}
    if arguments.output:
        trace.save(arguments.output)
    if not arguments.quiet:
        warn_beyond_context(rnn, trace.length)
        places = " and ".join(filter(None, (arguments.output, arguments.html)))
        note(f"trace of {trace.length:,} tokens in {places}")
    _print(trace, arguments)


def _trace(rnn: RNN, ids: Iterator[int], total: int | None, quiet: bool) -> Trace:
    """Read the ids with a trace; their numbers go into it."""
    import torch

    from ..rnn import pieces

    tokens = array("i")

    def recorded() -> Iterator[list[int]]:
        for piece in pieces(ids, rnn.piece) if rnn.prompt == "recurrent" else [list(ids)]:
            tokens.extend(piece)
            yield piece

    _, state = prefill(rnn, recorded(), rnn.start(trace=True), total=total, quiet=quiet)
    trace = state.trace
    trace.tokens = torch.tensor([tokens], dtype=torch.long)
    return trace


def _print(trace: Trace, arguments: Namespace) -> None:
    layers = [_summary(trace, layer) for layer in range(len(trace.deaths))]
    if arguments.json:
        about = {
            "file": arguments.output,
            "html": arguments.html,
            "tokens": trace.length,
            "policy": trace.policy,
            "model": trace.model,
        }
        print(json.dumps(about | {"layers": layers}))
        return
    rows = [
        (row["layer"], _range(row["held_by_unit"]), f"{row['recent']:.0%}", _first_token(row["first"]), row["oldest"])
        for row in layers
    ]
    print(table(rows, ("layer", "held", "recent", "first token", "oldest kept")))
    print("recent: the share of the held tokens that stand in the newer half of the text")


def _range(held: list[int]) -> str:
    """16, or 5 to 40 where the heads of a layer differ."""
    return f"{min(held):,}" if min(held) == max(held) else f"{min(held):,} to {max(held):,}"


def _first_token(share: float) -> str:
    """Whether the first token is still held, or by what share of the units."""
    return "kept" if share == 1 else "gone" if share == 0 else f"kept by {share:.0%}"


def _summary(trace: Trace, layer: int) -> dict[str, Any]:
    """What a layer holds at the end; of several units, the fullest, and means over them."""
    held = trace.held(layer, trace.length - 1)[0]  # [U, T]
    newer = held[:, trace.length // 2 :].sum() / held.sum()
    return {
        "layer": layer,
        "held": int(held.sum(1).max()),
        "held_by_unit": held.sum(1).tolist(),
        "recent": round(float(newer), 4),
        "first": round(float(held[:, 0].float().mean()), 4),
        "oldest": int(held.any(0).int().argmax()),
    }
