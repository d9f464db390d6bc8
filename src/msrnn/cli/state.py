"""`msrnn state build`: read a text once and save the state, for requests that begin with this text."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from ..system.console import note
from . import options
from .argument_parser import Commands, Parser
from .session import announce_cost, load_rnn

_ABOUT = """\
Read a text and save the state after it. `msrnn serve MODEL --prefix NAME=FILE` starts every request whose prompt begins
with that text from the saved state, as if it had read the text. Model, policy and dtype must be those of the server.
"""
_EXAMPLES = """\
examples:
  msrnn state build meta-llama/Llama-3.1-8B-Instruct --policy tova:512 --text system.txt --system -o system.state
  msrnn serve meta-llama/Llama-3.1-8B-Instruct --policy tova:512 --prefix system=system.state
"""


def add(commands: Commands) -> None:
    about = "read a text once and save the state, for msrnn serve --prefix"
    parser = commands.add_parser("state", help=about, description=_ABOUT, epilog=_EXAMPLES)
    subcommands = parser.add_subparsers(metavar="build", required=True, parser_class=Parser, help=about)
    subcommands.type = str
    build = subcommands.add_parser("build", description=_ABOUT, epilog=_EXAMPLES)
    build.add_argument(
        "model", nargs="?", metavar="MODEL", help="a hub name or a folder (default: SmolLM2-135M-Instruct)"
    )
    build.add_argument("--text", required=True, metavar="FILE", help="a UTF-8 text file")
    build.add_argument("--system", action="store_true", help="the text is a system message: in the chat template")
    build.add_argument("-o", "--output", required=True, metavar="FILE", help="where the state goes")
    options.add_policy(build)
    options.add_model(build, option=False)
    options.add_quiet(build)
    build.set_defaults(run=run, prompt_mode="recurrent")


def run(arguments: Namespace) -> None:
    from ..hf.identity import weights_digest
    from ..rnn import pieces
    from .prefill import prefill

    options.check_policy(arguments)
    options.check_output_file(arguments.output, inputs=options.inputs(arguments))
    text = _read_text(Path(arguments.text))
    rnn, tokenizer = load_rnn(arguments)
    weights = weights_digest(arguments.model, revision=arguments.revision)
    if any(policy.capacity is None for policy in rnn.plan.parts):
        raise ValueError("'full' is not bounded, so a server cannot start from its state; give a capacity")
    ids = _tokens(tokenizer, text, arguments.system)
    if not arguments.quiet:
        announce_cost(rnn, len(ids))
    _, state = prefill(rnn, pieces(ids, rnn.piece), rnn.start(), total=len(ids), quiet=arguments.quiet)
    state.save(arguments.output, tokens=ids, notes={"weights": weights})
    if not arguments.quiet:
        note(f"the state after {len(ids):,} tokens is in {arguments.output}")


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"--text {path}: there is no such file; check the name") from None
    except OSError as error:
        raise ValueError(f"--text {path} cannot be read: {error.strerror or error}; give a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path} is not UTF-8 text: {error}; convert it, e.g. with iconv") from error
    if not text.strip():
        raise ValueError(f"--text {path} is empty; give at least one word")
    return text


def _tokens(tokenizer: Any, text: str, system: bool) -> list[int]:
    """As vLLM will tokenize a prompt that begins with the text."""
    from ..hf.chat_template import split_template

    if not system:
        return list(tokenizer(text)["input_ids"])
    before, _ = split_template(tokenizer, text.strip())
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])
