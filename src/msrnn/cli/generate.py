"""`msrnn generate`: continue a text, or answer a question about it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..hf.chat_template import split_template
from ..system.console import note
from ..system.tokenization import stream_tokens
from . import options
from .argument_parser import Commands, integer
from .generation import Generation, generate
from .prompt import Prompt, open_prompt
from .session import announce_cost, load_rnn, state_cost

if TYPE_CHECKING:
    from ..rnn import RNN

_ABOUT = """\
Continue a text of any length. The prompt is read through the bounded state, piece by piece, so memory depends on the
policy and not on the text. By default the text is continued as it stands; --chat makes it a message to the model.
"""
_EXAMPLES = """\
examples:
  msrnn generate "The capital of France is" --max-new-tokens 10
  msrnn generate -f book.txt --policy tova:1024 --question "Who did it?" --stream
  cat notes.txt | msrnn generate --policy h2o:256 --temperature 0.7 --seed 1
  msrnn generate -f book.txt --model Qwen/Qwen3-0.6B --dtype bfloat16 --json
  msrnn generate -f book.txt --policy tova:256 --profile profile.json
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser("generate", help="continue a text of any length", description=_ABOUT, epilog=_EXAMPLES)
    options.add_input(parser)
    group = parser.add_argument_group("chat")
    group.add_argument("--chat", action="store_true", help="put the text into the model's chat template")
    group.add_argument("--question", type=str, metavar="TEXT", help="ask this after the text (implies --chat)")
    options.add_policy(parser)
    options.add_prompt_mode(parser)
    options.add_model(parser)
    options.add_sampling(parser, tokens=128)
    parser.add_argument("--num-beams", type=integer(1), default=1, metavar="N", help="beam search (default: 1, none)")
    options.add_engine(parser, "prefill and decode")
    parser.add_argument("--stream", action="store_true", help="print the text token by token")
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    _check(arguments)
    prompt = open_prompt(arguments)
    rnn, tokenizer = load_rnn(arguments)
    ids = _tokens(arguments, prompt, tokenizer)

    from ..system.memory import Peak

    total = prompt.estimate_tokens(tokenizer)
    if not arguments.quiet:
        announce_cost(rnn, total and total + arguments.max_new_tokens)
    with Peak(rnn.device) as peak:
        result = generate(arguments, rnn, tokenizer, ids, total)
    text = tokenizer.decode(result.tokens, skip_special_tokens=True)
    if arguments.json:
        print(json.dumps({"text": text} | _facts(rnn, result) | {"peak_bytes": peak.bytes}, ensure_ascii=False))
    elif not arguments.stream:
        print(text)
    if not arguments.quiet:
        reading = f"read {result.prompt_length:,} tokens in {result.prefill_seconds:.1f} s"
        note(f"{reading}, wrote {len(result.tokens):,} in {result.decode_seconds:.1f} s; {result.held:,} held")


def _check(arguments: Namespace) -> None:
    """Refuse options that contradict each other, before anything is opened."""
    options.check_sampling(arguments)
    options.check_policy(arguments)
    if arguments.stream and arguments.num_beams > 1:
        raise ValueError("--stream cannot print beams before the search ends; leave out --stream or --num-beams")
    if arguments.stream and arguments.json:
        raise ValueError("--json prints one object at the end; leave out --stream")
    if arguments.question is not None and not arguments.question.strip():
        raise ValueError("the question is empty; ask something, or leave out --question")


def _tokens(arguments: Namespace, prompt: Prompt, tokenizer: Any) -> Iterator[int]:
    """The ids of the prompt, as they come; with --chat, in the chat template."""
    if not arguments.chat and arguments.question is None:
        return stream_tokens(tokenizer, prompt.blocks)
    before, after = split_template(tokenizer)
    question = f"\n\n{arguments.question.strip()}" if arguments.question else ""
    return stream_tokens(tokenizer, chain([before], prompt.blocks, [question + after]), special=False)


def _facts(rnn: RNN, result: Generation) -> dict[str, Any]:
    """What --json prints beside the text."""
    sizes = [policy.capacity for policy in rnn.plan.parts]
    predicted = state_cost(rnn, result.prompt_length + len(result.tokens))
    return {
        "model": str(rnn.model.config.name_or_path),
        "policy": str(rnn.plan),
        "prompt_mode": rnn.prompt,
        "capacity": None if None in sizes else max(size for size in sizes if size),
        "capacities": rnn.plan.capacities,
        "held": result.held,
        "tokens_read": result.prompt_length,
        "tokens_generated": len(result.tokens),
        "state_bytes": predicted.state,
        "full_bytes": predicted.full,
        "seconds": round(result.prefill_seconds + result.decode_seconds, 3),
        "read_seconds": round(result.prefill_seconds, 3),
        "tokens_per_second": round(len(result.tokens) / result.decode_seconds, 2),
    }
