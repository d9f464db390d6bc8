"""Options that several commands share, and what they may be. Light: no torch, no transformers."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn

POLICY = "tova:512"
DTYPES = ("auto", "float32", "bfloat16", "float16")


class Parser(argparse.ArgumentParser):
    """argparse with whole option names only, errors of one line, and epilogs printed as they are written."""

    def __init__(self, *args: object, **settings: object) -> None:
        defaults = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(*args, **(defaults | settings))  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        print(f"msrnn: error: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


Commands = argparse._SubParsersAction  # the only name argparse has for it


def whole(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text.replace("_", "").replace(",", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{text} is too small; it must be at least {low}")
        return value

    return read


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """A number from `low` (or `above` it) to `high`."""
    span = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (low < value if above else low <= value) or not value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text} is out of range; it must be {span}")
        return value

    return read


def add_input(parser: Parser) -> None:
    group = parser.add_argument_group("text")
    group.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text itself; - or nothing: standard input")
    group.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 text file of any length; - is standard input")


def add_policy(parser: Parser, *, option: bool = True) -> None:
    group = parser.add_argument_group("state")
    if option:
        group.add_argument(
            "--policy",
            metavar="POLICY",
            help="what each layer keeps: tova:512, window+4:512, h2o:512, full, ...; size in tokens, as a fraction of "
            f"the length (tova:1/8) or in bytes per sequence (tova:2GiB) (default: {POLICY})",
        )
    group.add_argument("--profile", metavar="FILE", help="one capacity per layer: a file of msrnn calibrate")
    group.add_argument(
        "--length", type=whole(1), metavar="N", help="what fractions are of (default: the model's trained context)"
    )


def add_prompt_mode(parser: Parser) -> None:
    parser.add_argument(
        "--prompt-mode",
        choices=("recurrent", "oneshot"),
        default="recurrent",
        help="recurrent: the prompt goes through the bounded state too; oneshot: it is read under full attention and "
        "then cut down, which needs memory for all of it (default: recurrent)",
    )


def add_model_place(parser: Parser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a hub name, a folder or a .gguf file (default: the bundled SmolLM2-135M-Instruct, fetched once)",
    )


def add_model(parser: Parser, *, option: bool = True, weights: bool = True) -> None:
    group = parser.add_argument_group("model")
    if option:
        group.add_argument(
            "--model",
            metavar="MODEL",
            help="a hub name, a folder or a .gguf file (default: the bundled SmolLM2-135M-Instruct, fetched once)",
        )
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub model")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="numbers to compute with (default: the model's)")
    group.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    if weights:
        group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
        group.add_argument("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's own choice)")


def add_sampling(parser: Parser, tokens: int) -> None:
    group = parser.add_argument_group("writing")
    group.add_argument(
        "--max-new-tokens", type=whole(1), default=tokens, metavar="N", help=f"tokens at most (default: {tokens})"
    )
    group.add_argument(
        "--temperature",
        type=number(0),
        default=0.0,
        metavar="X",
        help="above 0: sample (default: 0, the likeliest token)",
    )
    group.add_argument(
        "--top-p", type=number(0, 1, above=True), metavar="X", help="sample from the likeliest tokens of this total"
    )
    group.add_argument("--top-k", type=whole(1), metavar="N", help="sample from so many of the likeliest tokens")
    group.add_argument(
        "--repetition-penalty",
        type=number(0, above=True),
        default=1.0,
        metavar="X",
        help="above 1: repeat less (default: 1)",
    )
    group.add_argument("--seed", type=whole(0), metavar="N", help="sample the same again")


def add_output(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument("-q", "--quiet", action="store_true", help="no notes and no progress on standard error")


def add_results(parser: Parser) -> None:
    about = "files of records, traces, or folders of them (default: results, where msrnn eval puts records)"
    parser.add_argument("results", nargs="*", default=["results"], metavar="RESULTS", help=about)


def check_sampling(arguments: argparse.Namespace) -> None:
    for name in ("top_p", "top_k"):
        if getattr(arguments, name) is not None and arguments.temperature == 0:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} only matters when sampling; add e.g. --temperature 0.7, or leave it out")


def check_policy(arguments: argparse.Namespace) -> None:
    """Refuse a policy that no model could run, before one is loaded."""
    from ..policy import parse, plan, read_profile, split_profile

    policy, named = split_profile(arguments.policy or ("tova" if arguments.profile else POLICY))
    if named and arguments.profile:
        raise ValueError(f"--policy names the profile {named} and --profile {arguments.profile}; give one of them")
    if profile := arguments.profile or named:
        plan(f"{policy},profile={profile}", len(read_profile(profile)))
    else:
        parse(policy, length=arguments.length or 1 << 40, slot_bytes=1)
