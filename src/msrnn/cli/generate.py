"""`msrnn generate`: go on with a text, or answer a question about it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..hf.chat_template import split_template
from ..system.tokenization import stream_tokens
from . import options
from .decode import Written, write
from .prompt import Source, open_source
from .session import announce, cost_of, note, open_rnn

if TYPE_CHECKING:
    from ..rnn import RNN

_ABOUT = """\
Go on with a text of any length. The prompt is read through the bounded state, piece by piece, so memory depends on the
policy and not on the text. By default the text is continued as it stands; --chat makes it a message to the model.
"""
_MORE = """\
examples:
  msrnn generate "The capital of France is" --max-new-tokens 10
  msrnn generate -f book.txt --policy tova:1024 --question "Who did it?" --stream
  cat notes.txt | msrnn generate --policy h2o:256 --temperature 0.7 --seed 1
  msrnn generate -f book.txt --model Qwen/Qwen3-0.6B --dtype bfloat16 --json
  msrnn generate -f book.txt --policy tova:256 --profile profile.json
"""


def add(commands: options.Commands[options.Parser]) -> None:
    parser = commands.add_parser("generate", help="go on with a text of any length", description=_ABOUT, epilog=_MORE)
    options.add_input(parser)
    group = parser.add_argument_group("form")
    group.add_argument("--chat", action="store_true", help="put the text into the model's chat template")
    group.add_argument("--question", metavar="TEXT", help="ask this after the text (implies --chat)")
    options.add_policy(parser)
    options.add_prompt_mode(parser)
    options.add_model(parser)
    options.add_sampling(parser, tokens=128)
    parser.add_argument(
        "--num-beams", type=options.whole(1), default=1, metavar="N", help="beam search (default: 1, none)"
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "on", "off"),
        default="auto",
        help="read and write with msrnn's engine, or with transformers' generate (default: on a GPU)",
    )
    parser.add_argument("--stream", action="store_true", help="print the text as it is written")
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    _check(arguments)
    source = open_source(arguments)
    rnn, tokenizer = open_rnn(arguments)
    ids = _tokens(arguments, source, tokenizer)

    from ..hf.cost import Peak

    total = source.estimate(tokenizer)
    if not arguments.quiet:
        announce(rnn, total and total + arguments.max_new_tokens)
    with Peak(rnn.device) as peak:
        made = write(arguments, rnn, tokenizer, ids, total)
    text = tokenizer.decode(made.tokens, skip_special_tokens=True)
    if arguments.json:
        print(json.dumps({"text": text} | _facts(rnn, made) | {"peak_bytes": peak.bytes}, ensure_ascii=False))
    elif not arguments.stream:
        print(text)
    if not arguments.quiet:
        note(
            f"read {made.read:,} tokens in {made.reading:.1f} s, wrote {len(made.tokens):,} in {made.writing:.1f} s; "
            f"{made.held:,} held"
        )


def _check(arguments: Namespace) -> None:
    options.check_sampling(arguments)
    options.check_policy(arguments)
    if arguments.stream and arguments.num_beams > 1:
        raise ValueError("--stream cannot print beams, which change their mind; leave out --stream or --num-beams")
    if arguments.stream and arguments.json:
        raise ValueError("--json prints one object at the end; leave out --stream")
    if arguments.question is not None and not arguments.question.strip():
        raise ValueError("the question is empty; ask something, or leave out --question")


def _tokens(arguments: Namespace, source: Source, tokenizer: Any) -> Iterator[int]:
    """The ids to read, as they come; in chat form, the template stands around the text."""
    if not arguments.chat and arguments.question is None:
        return stream_tokens(tokenizer, source.blocks)
    before, after = split_template(tokenizer)
    question = f"\n\n{arguments.question.strip()}" if arguments.question else ""
    return stream_tokens(tokenizer, chain([before], source.blocks, [question + after]), special=False)


def _facts(rnn: RNN, made: Written) -> dict[str, str | int | float | list[int | None] | None]:
    capacities = [policy.capacity for policy in rnn.plan.policies]
    price = cost_of(rnn, made.read + len(made.tokens))
    return {
        "model": str(rnn.model.config.name_or_path),
        "policy": str(rnn.plan),
        "prompt_mode": rnn.prompt,
        "capacity": None if None in capacities else max(c for c in capacities if c),
        "capacities": capacities,
        "held": made.held,
        "tokens_read": made.read,
        "tokens_generated": len(made.tokens),
        "state_bytes": price.state,
        "full_bytes": price.full,
        "seconds": round(made.reading + made.writing, 3),
        "read_seconds": round(made.reading, 3),
        "tokens_per_second": round(len(made.tokens) / made.writing, 2),
    }
