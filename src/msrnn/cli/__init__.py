"""The command line: parse, call, print. One file per command; exit codes are settled here.

torch and transformers are imported when a command runs, never before: help and refusals are instant.
"""

from __future__ import annotations

import io
import os
import sys

from . import advise, bench, calibrate, chat, eval, generate, info, play, plot, report, retention, serve, state, trace
from .argument_parser import Parser
from .errors import CAUGHT, is_user_error, one_line

COMMANDS = (generate, chat, play, trace, info, eval, retention, plot, report, advise, calibrate, bench, serve, state)
_ABOUT = """\
Run a Hugging Face decoder LLM as a bounded multi-state RNN: every layer keeps at most as many tokens as the policy
says, whatever the length of the text. Without --model, the small default SmolLM2-135M-Instruct is used.
"""
_EXAMPLES = """\
examples:
  msrnn generate "Once upon a time" --policy tova:512
  msrnn generate -f book.txt --question "Who did it?" --stream
  msrnn chat --policy tova:256
  msrnn trace -f book.txt -o trace.safetensors
  msrnn bench --shape llama-2-7b
  msrnn info meta-llama/Llama-3.1-8B tova:1/8 --memory 24GiB
  msrnn serve meta-llama/Llama-3.1-8B-Instruct --policy tova:1024
  msrnn advise --text book.txt --within 0.4
  msrnn calibrate --average 256 -o profile.json

exit codes: 0 done, 2 input that cannot be used (one line says why), 130 interrupted.
With MSRNN_TRACEBACK=1 in the environment, errors come with their traceback.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    try:
        code = run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("\nmsrnn: interrupted", file=sys.stderr)
        return 130
    except CAUGHT as error:
        if not is_user_error(error):
            raise
        print(f"msrnn: error: {one_line(error)}", file=sys.stderr)
        return 2


def run(argv: list[str] | None) -> int:
    """Parse the arguments and run the command; errors are raised."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed help, or what is wrong
        return stop.code if isinstance(stop.code, int) else 0
    arguments.run(arguments)
    return 0


def parser() -> Parser:
    """The parser of `msrnn`, with a subparser for each command."""
    from .. import __version__

    root = Parser(prog="msrnn", description=_ABOUT, epilog=_EXAMPLES)
    root.add_argument("--version", action="version", version=f"msrnn {__version__}")
    commands = root.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    commands.type = str  # it sees all arguments first, some of which may be empty
    for command in COMMANDS:
        command.add(commands)
    return root
