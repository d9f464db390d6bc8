"""`msrnn generate`: go on with a text, or answer a question about it."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from array import array
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..text import stream_tokens
from . import options
from .opening import announce, cost_of, note, open_rnn, warn_beyond
from .source import Source, feed, open_source
from .template import split_template

if TYPE_CHECKING:
    from ..rnn import RNN, RNNState

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
    parser.add_argument("--stream", action="store_true", help="print the text as it is written")
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    _check(arguments)
    source = open_source(arguments)
    rnn, tokenizer = open_rnn(arguments)
    ids = _tokens(arguments, source, tokenizer)

    from ..memory import Peak

    total = source.estimate(tokenizer)
    if not arguments.quiet:
        announce(rnn, total and total + arguments.max_new_tokens)
    began = time.perf_counter()
    with Peak(rnn.device) as peak:
        read, state = take_in(rnn, ids, total, arguments.quiet)
        if not arguments.quiet:
            warn_beyond(rnn, len(read))
        between = time.perf_counter()
        written = _write(arguments, rnn, tokenizer, read, state)
    ended = time.perf_counter()
    text = tokenizer.decode(written, skip_special_tokens=True)
    if arguments.json:
        facts = _facts(rnn, state, len(read), len(written), between - began, ended - between)
        print(json.dumps({"text": text} | facts | {"peak_bytes": peak.bytes}, ensure_ascii=False))
    elif not arguments.stream:
        print(text)
    if not arguments.quiet:
        note(
            f"read {len(read):,} tokens in {between - began:.1f} s, wrote {len(written):,} in {ended - between:.1f} s; "
            f"{state.held:,} held"
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


def take_in(rnn: RNN, ids: Iterator[int], total: int | None, quiet: bool) -> tuple[array[int], RNNState]:
    """All ids, of which the state has read all but the last: that one is for `generate` to begin with."""
    from ..rnn import pieces

    read, kept = array("i"), array("i")

    def ready() -> Iterator[list[int]]:
        nonlocal kept
        for piece in pieces(ids, rnn.piece):
            read.extend(piece)
            yield from [kept.tolist()] if kept else []
            kept = array("i", piece)
        yield from [kept.tolist()[:-1]] if len(kept) > 1 else []

    state = rnn.start()
    if rnn.prompt == "oneshot":  # one call must see the whole prompt, and `generate` makes it
        read.extend(ids)
        return read, state
    return read, feed(rnn, ready(), state, total=total, quiet=quiet)[1]


def _write(arguments: Namespace, rnn: RNN, tokenizer: Any, read: array[int], state: RNNState) -> list[int]:
    """The new ids. The state moves on with them."""
    import torch
    from transformers import TextStreamer

    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    if arguments.num_beams > 1:
        state.cache.batch_repeat_interleave(arguments.num_beams)
    prompt = torch.tensor([read], dtype=torch.long, device=rnn.device)
    sampling: dict[str, float | None] = {"temperature": None, "top_p": None, "top_k": None}
    if arguments.temperature > 0:
        sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": arguments.top_k or 0}
    made = rnn.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=state.cache,
        max_new_tokens=arguments.max_new_tokens,
        do_sample=arguments.temperature > 0,
        repetition_penalty=arguments.repetition_penalty,
        num_beams=arguments.num_beams,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if arguments.stream else None,
        **sampling,
    )
    new: list[int] = made[0, len(read) :].tolist()
    return new


def _facts(
    rnn: RNN, state: RNNState, read: int, written: int, reading: float, writing: float
) -> dict[str, str | int | float | list[int | None] | None]:
    capacities = [policy.capacity for policy in rnn.plan.policies]
    price = cost_of(rnn, read + written)
    return {
        "model": str(rnn.model.config.name_or_path),
        "policy": str(rnn.plan),
        "prompt_mode": rnn.prompt,
        "capacity": None if None in capacities else max(c for c in capacities if c),
        "capacities": capacities,
        "held": state.held,
        "tokens_read": read,
        "tokens_generated": written,
        "state_bytes": price.state,
        "full_bytes": price.full,
        "seconds": round(reading + writing, 3),
        "read_seconds": round(reading, 3),
        "tokens_per_second": round(written / writing, 2),
    }
