"""`msrnn state build`: read a text once and keep the state, for requests that begin with it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from . import options
from .session import announce, note, open_rnn

_ABOUT = """\
Read a text and keep the state after it in a file. `msrnn serve MODEL --prefix NAME=FILE` starts every request from that
state whose prompt begins with that text, as if it had read it. Model, policy and dtype must be those of the server.
"""
_MORE = """\
examples:
  msrnn state build meta-llama/Llama-3.1-8B-Instruct --policy tova:512 --text system.txt --system -o system.state
  msrnn serve meta-llama/Llama-3.1-8B-Instruct --policy tova:512 --prefix system=system.state
"""


def add(commands: options.Commands[options.Parser]) -> None:
    about = "keep the state after a text, for a server's requests to start from"
    parser = commands.add_parser("state", help=about, description=_ABOUT, epilog=_MORE)
    made = parser.add_subparsers(metavar="build", required=True, parser_class=options.Parser, help=about)
    build = made.add_parser("build", description=_ABOUT, epilog=_MORE)
    build.add_argument("model", nargs="?", metavar="MODEL", help="a hub name or a folder (default: the bundled model)")
    build.add_argument("--text", required=True, metavar="FILE", help="a UTF-8 text file")
    build.add_argument("--system", action="store_true", help="the text is a system message: in the chat template")
    build.add_argument("-o", "--output", required=True, metavar="FILE", help="where the state goes")
    options.add_policy(build)
    options.add_model(build, option=False)
    build.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
    build.set_defaults(run=run, prompt_mode="recurrent")


def run(arguments: Namespace) -> None:
    from ..hf.load import mark
    from .prompt import feed

    options.check_policy(arguments)
    text = _text(Path(arguments.text))
    weights = mark(arguments.model, revision=arguments.revision)
    rnn, tokenizer = open_rnn(arguments)
    if any(policy.capacity is None for policy in rnn.plan.policies):
        raise ValueError("'full' is not bounded, so a server cannot start from its state; give a capacity")
    ids = _tokens(tokenizer, text, arguments.system)
    if not arguments.quiet:
        announce(rnn, len(ids))
    pieces = [ids[start : start + rnn.piece] for start in range(0, len(ids), rnn.piece)]
    _, state = feed(rnn, pieces, rnn.start(), total=len(ids), quiet=arguments.quiet)
    state.save(arguments.output, tokens=ids, notes={"weights": weights})
    if not arguments.quiet:
        note(f"the state after {len(ids):,} tokens is in {arguments.output}")


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"--text {path} is empty; give at least one word")
    return text


def _tokens(tokenizer: object, text: str, system: bool) -> list[int]:
    """As vLLM will tokenize a prompt that begins with it."""
    from ..hf.chat_template import split_template

    if not system:
        ids: list[int] = tokenizer(text)["input_ids"]  # type: ignore[operator]
        return ids
    before, _ = split_template(tokenizer, text.strip())
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])  # type: ignore[operator]
