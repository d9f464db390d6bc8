"""`msrnn chat`: one bounded state for a whole conversation, however long it gets."""

from __future__ import annotations

import io
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..hf.chat_template import split_turns
from . import options
from .errors import MAYBE, expected, one_line
from .prompt import feed
from .session import announce, cost_of, note, open_rnn

if TYPE_CHECKING:
    from torch import Tensor

_ABOUT = """\
Talk with a model. One bounded state holds the whole conversation: every message is read once, and neither memory nor
the time per token grows with its length. Ctrl-C stops an answer; the end of the input (Ctrl-D) or /quit ends the chat.
"""
_HELP = """\
  /save FILE   write the state to a file; it holds all that the model remembers
  /load FILE   go on from a saved state (same model, policy and dtype)
  /state       tokens read and held, bytes
  /reset       forget everything
  /help        this list
  /quit        end the chat
A message that begins with / is sent with a space before it."""
_MORE = f"""\
in the chat:
{_HELP}

examples:
  msrnn chat --policy tova:256
  msrnn chat --system "You are a pirate." --temperature 0.7 --top-p 0.9
  printf 'My name is Ada.\\n/save ada.state\\n' | msrnn chat
  printf '/load ada.state\\nWhat is my name?\\n' | msrnn chat
"""


def add(commands: options.Commands[options.Parser]) -> None:
    parser = commands.add_parser("chat", help="talk with a model", description=_ABOUT, epilog=_MORE)
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: the model's own)")
    options.add_policy(parser)
    options.add_prompt_mode(parser)
    options.add_model(parser)
    options.add_sampling(parser, tokens=512)
    parser.add_argument("-q", "--quiet", action="store_true", help="no notes and no progress on standard error")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    options.check_sampling(arguments)
    options.check_policy(arguments)
    chat = Chat(arguments)
    if not arguments.quiet:
        announce(chat.rnn, None)
        note("/help lists the commands")
    for line in _lines():
        try:
            if not chat.hear(line):
                break
        except BrokenPipeError:
            raise
        except MAYBE as error:
            if not expected(error):
                raise
            note(f"error: {one_line(error)}")


class Chat:
    """A conversation: the model, the template and the one state."""

    def __init__(self, arguments: Namespace) -> None:
        import torch
        from transformers import TextStreamer

        self.options = arguments
        self.rnn, self.tokenizer = open_rnn(arguments)
        self.turns = split_turns(self.tokenizer, arguments.system)
        self.screen: Any = TextStreamer(self.tokenizer, skip_special_tokens=True)
        self.warpers = _warpers(arguments)
        self.ends = _ends(self.rnn.model, self.tokenizer)
        self.state = self.rnn.start()
        self.ids: list[int] = []  # what a repetition penalty looks at
        if arguments.seed is not None:
            torch.manual_seed(arguments.seed)

    def hear(self, line: str) -> bool:
        """Act on one line of input; False when it was the last."""
        if any("\ud800" <= letter <= "\udfff" for letter in line):
            raise ValueError("that line is not UTF-8 text; it was not sent")
        command, _, rest = line.rstrip().partition(" ")
        if command == "/quit":
            return False
        if line.startswith("/"):
            self.obey(command, rest.strip())
        elif line.strip():
            self.answer(line.strip())
        return True

    def obey(self, command: str, rest: str) -> None:
        if command in ("/save", "/load") and not rest:
            raise ValueError(f"{command} needs the name of a file: {command} FILE")
        if command == "/save":
            self.state.save(rest)
            print(f"saved {self.seen:,} tokens' memory to {rest}")
        elif command == "/load":
            self.state, self.ids = self.rnn.load(rest), []
            print(f"loaded {rest}: {self.describe()}")
        elif command == "/state":
            print(self.describe())
        elif command == "/reset":
            self.state, self.ids = self.rnn.start(), []
            print("forgotten")
        elif command == "/help":
            print(_HELP)
        else:
            raise ValueError(f"unknown command {command}; allowed: /save, /load, /state, /reset, /help, /quit")
        sys.stdout.flush()

    @property
    def seen(self) -> int:
        return self.state.seen[0] if self.state.seen else 0

    def describe(self) -> str:
        from ..hf.cost import human

        full = cost_of(self.rnn, max(self.seen, 1)).full if self.seen else 0
        held = f"{self.seen:,} tokens read, {self.state.held:,} held"
        return f"{self.rnn.plan}: {held} in {human(self.state.nbytes)}; a full cache would take {human(full)}"

    def answer(self, message: str) -> None:
        """Read a message, then write until the model ends its turn. Every token written is read back at once."""
        from ..rnn import pieces

        prefix = self.turns.next_prefix if self.seen else self.turns.first_prefix
        text = prefix + message + self.turns.suffix
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        self.ids += ids
        size = len(ids) if self.rnn.prompt == "oneshot" else self.rnn.piece
        try:
            with _patience() as interrupted:
                logits, self.state = feed(self.rnn, pieces(ids, size), self.state, quiet=self.options.quiet)
                self.write(logits, interrupted)
        except MAYBE:  # in the middle of a step: what the layers hold no longer fits together
            self.state, self.ids = self.rnn.start(), []
            note("the conversation is lost and begins again; /load takes up a saved one")
            raise

    def write(self, logits: Tensor | None, interrupted: list[bool]) -> None:
        import torch

        for _ in range(self.options.max_new_tokens):
            token = self.choose(logits)
            if token in self.ends or interrupted:
                break
            self.screen.put(torch.tensor([token]))
            self.ids.append(token)
            logits, self.state = self.rnn.step(torch.tensor([[token]]), self.state)
        else:
            if not self.options.quiet:
                note(f"stopped after {self.options.max_new_tokens} tokens; --max-new-tokens allows more")
        self.screen.end()

    def choose(self, logits: Any) -> int:
        import torch

        scores = self.warpers(torch.tensor([self.ids], device=logits.device), logits.float())
        if self.options.temperature == 0:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1))


def _warpers(arguments: Namespace) -> Any:
    """transformers' own, in the order in which its `generate` applies them."""
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chosen = LogitsProcessorList()
    if arguments.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(arguments.repetition_penalty))
    if arguments.temperature > 0:
        chosen.append(TemperatureLogitsWarper(arguments.temperature))
    if arguments.top_k:
        chosen.append(TopKLogitsWarper(arguments.top_k))
    if arguments.top_p:
        chosen.append(TopPLogitsWarper(arguments.top_p))
    return chosen


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a turn."""
    named = model.generation_config.eos_token_id
    listed = named if isinstance(named, list) else [named]
    return {token for token in (*listed, tokenizer.eos_token_id) if token is not None}


def _lines() -> Iterator[str]:
    """What is typed or piped in, line by line."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # `hear` refuses what is not text
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401 (gives input() its history and its arrow keys)

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


@contextmanager
def _patience() -> Iterator[list[bool]]:
    """Ctrl-C at a terminal ends the answer between two tokens, never inside a step; pressed again, it ends the chat."""
    interrupted: list[bool] = []
    if not sys.stdin.isatty():
        yield interrupted
        return

    def stop(*_: object) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)

    old = signal.signal(signal.SIGINT, stop)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, old)
