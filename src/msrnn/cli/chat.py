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
from ..system.console import note
from . import options
from .argument_parser import Commands
from .errors import CAUGHT, is_user_error, one_line
from .prefill import prefill
from .session import announce_cost, load_rnn, state_cost

if TYPE_CHECKING:
    from torch import Tensor

_ABOUT = """\
Talk with a model. One bounded state holds the whole conversation: every message is read once, and neither memory nor
the time per token grows with its length. Ctrl-C stops an answer; the end of the input (Ctrl-D) or /quit ends the chat.
"""
_HELP = """\
  /save FILE   write the state to a file; it holds all that the model remembers
  /load FILE   continue from a saved state (same model, policy and dtype)
  /state       tokens read and held, bytes
  /reset       forget everything
  /help        this list
  /quit        end the chat
A message that begins with / is sent with a space before it."""
_EXAMPLES = f"""\
in the chat:
{_HELP}

examples:
  msrnn chat --policy tova:256
  msrnn chat --system "You are a pirate." --temperature 0.7 --top-p 0.9
  printf 'My name is Ada.\\n/save ada.state\\n' | msrnn chat
  printf '/load ada.state\\nWhat is my name?\\n' | msrnn chat
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser("chat", help="talk with a model", description=_ABOUT, epilog=_EXAMPLES)
    parser.add_argument("--system", type=str, metavar="TEXT", help="system prompt (default: the model's own)")
    options.add_policy(parser)
    options.add_prompt_mode(parser)
    options.add_model(parser)
    options.add_sampling(parser, tokens=512)
    options.add_quiet(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    options.check_sampling(arguments)
    options.check_policy(arguments)
    chat = Chat(arguments)
    if not arguments.quiet:
        announce_cost(chat.rnn, None)
        note("/help lists the commands")
    for line in _input_lines():
        try:
            if not chat.handle(line):
                break
        except BrokenPipeError:
            raise
        except CAUGHT as error:
            if not is_user_error(error):
                raise
            note(f"error: {one_line(error)}")


class Chat:
    """A conversation: the model, its chat template and one state."""

    def __init__(self, arguments: Namespace) -> None:
        import torch
        from transformers import TextStreamer

        self.options = arguments
        self.rnn, self.tokenizer = load_rnn(arguments)
        self.turns = split_turns(self.tokenizer, arguments.system)
        self.streamer: Any = TextStreamer(self.tokenizer, skip_special_tokens=True)
        self.processors = _logits_processors(arguments)
        self.stop_tokens = _stop_tokens(self.rnn.model, self.tokenizer)
        self.state = self.rnn.start()
        self.ids: list[int] = []  # for the repetition penalty
        if arguments.seed is not None:
            torch.manual_seed(arguments.seed)

    def handle(self, line: str) -> bool:
        """Act on one line of input: a command or a message; False after /quit."""
        if any("\ud800" <= letter <= "\udfff" for letter in line):
            raise ValueError("that line is not UTF-8 text; it was not sent")
        command, _, rest = line.rstrip().partition(" ")
        if command == "/quit":
            return False
        if line.startswith("/"):
            self.run_command(command, rest.strip())
        elif line.strip():
            self.answer(line.strip())
        return True

    def run_command(self, command: str, path: str) -> None:
        """Act on a line that begins with a slash."""
        if command in ("/save", "/load") and not path:
            raise ValueError(f"{command} needs the name of a file: {command} FILE")
        if command == "/save":
            self.state.save(options.check_output_file(path, "/save", options.inputs(self.options)))
            print(f"saved the state after {self.seen:,} tokens to {path}")
        elif command == "/load":
            self.state, self.ids = self.rnn.load(path), []
            print(f"loaded {path}: {self.describe()}")
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
        """Tokens read so far."""
        return self.state.seen[0] if self.state.seen else 0

    def describe(self) -> str:
        """The policy, and what the state holds and takes."""
        from ..system.sizes import human

        full = state_cost(self.rnn, max(self.seen, 1)).full if self.seen else 0
        held = f"{self.seen:,} tokens read, {self.state.held:,} held"
        return f"{self.rnn.plan}: {held} in {human(self.state.nbytes)}; a full cache would take {human(full)}"

    def answer(self, message: str) -> None:
        """Prefill a message, then decode until the model ends its turn."""
        from ..rnn import pieces

        prefix = self.turns.next_prefix if self.seen else self.turns.first_prefix
        text = prefix + message + self.turns.suffix
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        self.ids += ids
        size = len(ids) if self.rnn.prompt == "oneshot" else self.rnn.piece
        try:
            with _deferred_interrupt() as interrupted:
                logits, self.state = prefill(self.rnn, pieces(ids, size), self.state, quiet=self.options.quiet)
                self.decode(logits, interrupted)
        except CAUGHT:  # in the middle of a step: some layers have read a token that others have not
            self.state, self.ids = self.rnn.start(), []
            note("the conversation is lost and begins again; /load continues a saved one")
            raise

    def decode(self, logits: Tensor | None, interrupted: list[bool]) -> None:
        """Print tokens until one ends the turn, or Ctrl-C was pressed."""
        import torch

        for _ in range(self.options.max_new_tokens):
            token = self.sample(logits)
            if token in self.stop_tokens or interrupted:
                break
            self.streamer.put(torch.tensor([token]))
            self.ids.append(token)
            logits, self.state = self.rnn.step(torch.tensor([[token]]), self.state)
        else:
            if not self.options.quiet:
                note(f"stopped after {self.options.max_new_tokens} tokens; --max-new-tokens allows more")
        self.streamer.end()

    def sample(self, logits: Any) -> int:
        """The next token."""
        import torch

        scores = self.processors(torch.tensor([self.ids], device=logits.device), logits.float())
        if self.options.temperature == 0:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1))


def _logits_processors(arguments: Namespace) -> Any:
    """transformers' own, in the order in which `generate` applies them."""
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList()
    if arguments.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(arguments.repetition_penalty))
    if arguments.temperature > 0:
        processors.append(TemperatureLogitsWarper(arguments.temperature))
    if arguments.top_k:
        processors.append(TopKLogitsWarper(arguments.top_k))
    if arguments.top_p:
        processors.append(TopPLogitsWarper(arguments.top_p))
    return processors


def _stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a turn."""
    eos = model.generation_config.eos_token_id
    tokens = eos if isinstance(eos, list) else [eos]
    return {token for token in (*tokens, tokenizer.eos_token_id) if token is not None}


def _input_lines() -> Iterator[str]:
    """Lines of standard input: typed at a prompt, or piped in."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # `handle` refuses what is not text
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
def _deferred_interrupt() -> Iterator[list[bool]]:
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
