"""Options that several commands share, and checks of them. Light: no torch, no transformers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .argument_parser import Parser, integer, number

POLICY = "tova:512"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_MODEL = "a hub name, a folder or a .gguf file (default: SmolLM2-135M-Instruct, downloaded once, 93 MB)"


def add_input(parser: Parser) -> None:
    """PROMPT and --file."""
    group = parser.add_argument_group("text")
    group.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text itself; - or nothing: standard input")
    group.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 text file of any length; - is standard input")


def add_policy(parser: Parser, *, option: bool = True) -> None:
    """--policy (unless the command has it as an argument), --profile and --length."""
    group = parser.add_argument_group("state")
    if option:
        group.add_argument(
            "--policy",
            metavar="POLICY",
            help="what each layer keeps: best:512, tova:512, window+4:512, h2o:512, full, ...; size in tokens, as a "
            f"fraction of the length (tova:1/8) or in bytes per sequence (tova:2GiB) (default: {POLICY})",
        )
    group.add_argument(
        "--profile",
        metavar="FILE",
        help="a capacity for each layer or KV head: a file written by msrnn calibrate, or the name of a profile that "
        "ships",
    )
    group.add_argument(
        "--length",
        type=integer(1),
        metavar="N",
        help="the length of your texts: fractions such as tova:1/8 refer to it, and best has other budgets for texts "
        "beyond the model's trained context (default: that context)",
    )


def add_prompt_mode(parser: Parser) -> None:
    """--prompt-mode."""
    parser.add_argument(
        "--prompt-mode",
        choices=("recurrent", "oneshot"),
        default="recurrent",
        help="recurrent: the prompt goes through the bounded state too; oneshot: prefill under full attention, then "
        "evict down to the capacity, which needs memory for the whole prompt (default: recurrent)",
    )


def add_model_argument(parser: Parser) -> None:
    """MODEL, as an argument."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL)


def add_model(parser: Parser, *, option: bool = True, weights: bool = True) -> None:
    """--model (unless the command has it as an argument), and how it is loaded; `weights`: where it runs."""
    group = parser.add_argument_group("model")
    if option:
        group.add_argument("--model", metavar="MODEL", help=_MODEL)
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub model")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and KV cache (default: the model's)")
    group.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    if weights:
        group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
        group.add_argument("--threads", type=integer(1), metavar="N", help="CPU threads (default: torch's own choice)")


def add_sampling(parser: Parser, tokens: int) -> None:
    """How many tokens to generate, and how they are chosen."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens", type=integer(1), default=tokens, metavar="N", help=f"tokens at most (default: {tokens})"
    )
    group.add_argument(
        "--temperature", type=number(0), default=0.0, metavar="X", help="above 0: sample (default: 0, greedy)"
    )
    group.add_argument(
        "--top-p",
        type=number(0, 1, above=True),
        metavar="X",
        help="nucleus sampling: from the most likely tokens that add up to this probability",
    )
    group.add_argument("--top-k", type=integer(1), metavar="N", help="sample from the N most likely tokens")
    group.add_argument(
        "--repetition-penalty",
        type=number(0, above=True),
        default=1.0,
        metavar="X",
        help="above 1: repeat less (default: 1)",
    )
    group.add_argument("--seed", type=integer(0), metavar="N", help="random seed; the same seed gives the same samples")


def add_engine(parser: Parser, verb: str) -> None:
    """--engine; `verb` says what it is used for."""
    parser.add_argument(
        "--engine",
        choices=("auto", "on", "off"),
        default="auto",
        help=f"{verb} with msrnn's engine, or with transformers' generate (default: auto, the engine on a GPU)",
    )


def add_output(parser: Parser) -> None:
    """--json and --quiet."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    add_quiet(parser)


def add_quiet(parser: Parser) -> None:
    """--quiet."""
    parser.add_argument("-q", "--quiet", action="store_true", help="no notes and no progress on standard error")


def add_results(parser: Parser) -> None:
    """RESULTS: files and folders of records."""
    about = "files of records, traces, or folders of them (default: results, where msrnn eval puts records)"
    parser.add_argument("results", nargs="*", default=["results"], metavar="RESULTS", help=about)


def check_sampling(arguments: argparse.Namespace) -> None:
    """Refuse sampling options that greedy decoding would ignore."""
    for name in ("top_p", "top_k"):
        if getattr(arguments, name) is not None and arguments.temperature == 0:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} only matters when sampling; add e.g. --temperature 0.7, or leave it out")


def check_policy(arguments: argparse.Namespace) -> None:
    """Refuse a policy that no model could run, before one is loaded."""
    from ..budgets.profile import plan_for, read_profile
    from ..policy import check_size, needs_model, split_policy

    policy = split_policy(arguments.policy or ("tova" if arguments.profile else POLICY))
    if policy.profile and arguments.profile:
        both = f"--policy names the profile {policy.profile} and --profile {arguments.profile}"
        raise ValueError(f"{both}; give one of them")
    profile = arguments.profile or policy.profile
    if profile and not needs_model(str(policy)):
        plan_for(str(replace(policy, profile=profile)), len(read_profile(profile)))
        return
    check_size(policy.policy, length=arguments.length or 1 << 40)
    if profile:
        read_profile(profile)


def check_output_file(path: str | Path, option: str = "--output", inputs: Iterable[str | Path | None] = ()) -> Path:
    """Refuse an output file that cannot be written, before hours of work, and one that would replace an input.

    `option` is where it was given.
    """
    path = Path(path)
    if any(one and path.resolve() == Path(one).resolve() for one in inputs):
        raise ValueError(f"{option} {path} would replace a file that this command reads or writes; give another name")
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: the folder {path.parent} cannot be written to; choose another")
    return path
