"""Options that several commands share, and checks of them. Light: no torch, no transformers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..budgets.profile import plan_for, profile_path, read_profile
from ..policy import PolicyText, check_size, is_best, needs_model, split_policy, with_capacity
from ..system.files import check_regular, target_of
from .argument_parser import Parser, integer, number

POLICY = "tova:512"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_MODEL = "a hub name, a folder or a .gguf file (default: SmolLM2-135M-Instruct, downloaded once, 93 MB)"


def add_input(parser: Parser) -> None:
    """PROMPT and --file."""
    group = parser.add_argument_group("text")
    group.add_argument(
        "prompt", nargs="?", type=str, metavar="PROMPT", help="the text itself; - or nothing: standard input"
    )
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
    policy = split_policy(arguments.policy or ("tova" if arguments.profile else POLICY))
    if policy.profile and arguments.profile:
        both = f"--policy names the profile {policy.profile} and --profile {arguments.profile}"
        raise ValueError(f"{both}; give one of them")
    if getattr(arguments, "prompt_mode", "") == "oneshot" and _has_residual(policy):
        raise ValueError(f"{policy}: a residual needs every eviction in its turn; use --prompt-mode recurrent")
    profile = arguments.profile or policy.profile
    if profile and not needs_model(str(policy)):
        plan_for(str(replace(policy, profile=profile)), len(read_profile(profile)))
        return
    check_size(policy.policy, length=arguments.length or 1 << 40)
    if profile:
        read_profile(profile)


def _has_residual(policy: PolicyText) -> bool:
    """Whether tokens that leave are blended into a mean."""
    plain = policy.kind.split(",")[0].lower() == "full" or is_best(policy.policy)
    return not plain and with_capacity(policy.policy, 1 << 20).residual is not None


class Input(NamedTuple):
    """What a command reads: the argument that names a file or folder, and the suffixes that it reads in a folder."""

    argument: str
    path: Path
    suffixes: tuple[str, ...] = ()


_INPUTS = {  # by the name that argparse stores them under
    "file": ("--file", ()),
    "text": ("--text", ()),
    "texts": ("TEXT", (".txt",)),
    "results": ("RESULTS", (".jsonl", ".safetensors")),
    "experiment": ("FILE", ()),
    "model": ("MODEL", (".bin", ".gguf", ".json", ".model", ".safetensors", ".txt")),
}


def inputs(arguments: argparse.Namespace) -> list[Input]:
    """The files and folders that a command reads, as far as its arguments name them."""
    named = {name: _words(getattr(arguments, name, None)) for name in (*_INPUTS, "profile", "policy")}
    files = [
        Input(argument, Path(one), suffixes)
        for name, (argument, suffixes) in _INPUTS.items()
        for one in named[name]
        if one != "-"
    ]
    files += [Input("--profile", profile_path(one)) for one in named["profile"]]
    for policy in map(split_policy, named["policy"]):
        files += [Input("--policy", profile_path(policy.profile))] if policy.profile else []
        rule, suffix, _ = policy.kind.split(",")[0].rpartition(".py")
        files += [Input("--policy", Path(rule + suffix))] if suffix else []
    return files


def _words(value: object) -> list[str]:
    """The value of an argument that may be missing, given once or given several times."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(one) for one in values if one]


def check_output_file(
    path: str | Path, option: str = "--output", inputs: Iterable[Input] = (), *, new_folder: bool = False
) -> Path:
    """Refuse an output file that cannot be written, before hours of work, and one that would replace an input.

    `option` is where it was given. `new_folder`: its folder will be made.
    """
    if str(path) == "-":
        raise ValueError(f"{option} - would be standard output, but a file is written; give its name")
    path = Path(path)
    for one in inputs:
        _check_not_read(path, option, one)
    try:
        check_regular(path)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    parents = target_of(path).parents
    folder = next(one for one in parents if one.exists() or not new_folder)
    if folder.is_file():
        raise ValueError(f"{option} {path}: {folder} is a file, not a folder; choose another")
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path}: the folder {folder} cannot be written to; choose another")
    return path


def _check_not_read(path: Path, option: str, one: Input) -> None:
    """Refuse to write where the command reads: an input itself, or a file among those of a folder."""
    if path.resolve() == one.path.resolve() or (path.exists() and one.path.exists() and path.samefile(one.path)):
        raise ValueError(f"{option} {path} would replace the file that {one.argument} names; give another name")
    folders = (path.parent.resolve(), path.resolve().parent)  # of a link, and of what it points to
    if path.suffix in one.suffixes and one.path.is_dir() and one.path.resolve() in folders:
        what = f"one of the files that {one.argument} reads, *{path.suffix} in {one.path}"
        raise ValueError(f"{option} {path} would be {what}; give another name")


def check_record_output(
    path: str | Path,
    option: str = "--output",
    inputs: Iterable[Input] = (),
    read: Callable[[Path], Iterable[object]] | None = None,
) -> Path:
    """The same for a file that records are added to: what is there must be records, as `read` knows them."""
    from ..eval.record import check_record_file, read_records

    path = check_output_file(path, option, inputs, new_folder=True)
    try:
        check_record_file(path, read or read_records)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    return path
