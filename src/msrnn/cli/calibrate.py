"""`msrnn calibrate`: measure which layers need slots, and write a profile that spends them there."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..budgets.profile import check_by_head, check_policy_kind, open_profile
from ..policy import is_best, split_policy
from ..system.console import note, progress, table
from . import options
from .argument_parser import Commands, integer
from .corpus import add_texts, batch_size, check_texts, read_chunks
from .session import load_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..budgets.calibrate import Settings

_GOALS = ("perplexity", "recall", "both")
_ABOUT = """\
Measure on a text how the loss grows as each single layer shrinks (the others full), and spend an average number of
slots per layer where it buys most. The profile that this writes gives every layer its own capacity at the same total
memory as the plain policy; it names the model it was made for and refuses others. A run that was killed resumes when
the same command is given again: measurements are kept beside the profile, in OUTPUT.measured.jsonl. Another --average
uses them too and joins those of the profile, which stay as they are. With --for recall only the answers to questions
about facts count, which are hidden in the text; with --for both the text and these answers.

With --by head every KV head gets its own capacity, for policies whose heads decide alone (fade, h2o, tova-head). The
loss of a chunk is shared out to all heads by gradients, which takes as much memory as a training step on the chunk.
There are no joint moves (--rounds) then.
"""
_EXAMPLES = """\
examples:
  msrnn calibrate --average 256 -o profile.json
  msrnn calibrate Qwen/Qwen3-0.6B --text a.txt --text b.txt --average 256 --average 512 -o profile.json
  msrnn generate -f book.txt --policy tova:256 --profile profile.json
  msrnn calibrate --policy fade --for recall --average 512 -o recall.json
  msrnn calibrate --by head --policy fade --text a.txt --chunks 8 --average 512 -o heads.json
  msrnn calibrate --policy h2o-layer --length 1024 --chunks 2 --grid 16,64,256 --rounds 0 --average 64 -o quick.json

On a GPU 8 chunks of 4,096 tokens and capacities that double are measured, then 2 rounds of joint moves; on a CPU
2 chunks of 2,048 tokens, capacities that quadruple, and no joint moves. By KV head 8 chunks are
read on both. The bar says how long it will take.
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "calibrate", help="one capacity per layer, or per KV head", description=_ABOUT, epilog=_EXAMPLES
    )
    options.add_model_argument(parser)
    size = "slots per layer, on average; may be repeated, for a profile of several sizes"
    parser.add_argument("--average", action="append", required=True, type=integer(1), metavar="N", help=size)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="where the profile goes")
    parser.add_argument("--policy", default="tova", metavar="KIND", help="a policy without a size (default: tova)")
    parser.add_argument("--by", default="layer", choices=("layer", "head"), help="what has a capacity (default: layer)")
    goal = "what slots are spent on: the text's perplexity (default), facts hidden in it, or both"
    parser.add_argument("--for", dest="goal", default="perplexity", choices=_GOALS, help=goal)
    parser.add_argument("--grid", metavar="N,N,...", help="capacities to try (default: up to half of a chunk)")
    parser.add_argument("--rounds", type=integer(0), metavar="N", help="joint moves (default: 2 on a GPU, else 0)")
    add_texts(parser, required=False, chunks="8 on a GPU, else 2")
    options.add_model(parser, option=False)
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    kind, grid = _kind(arguments.policy), _grid(arguments.grid)
    by_head = arguments.by == "head"
    if by_head:
        _check_by_head(arguments, kind)
    output = options.check_output_file(arguments.output)
    earlier = _earlier(output)
    _check_same(output, earlier, policy=kind, by=arguments.by, **{"for": arguments.goal})
    check_texts(arguments)

    from .. import __version__
    from ..budgets.by_head import calibrate_by_head, check_heads, estimate_count
    from ..budgets.calibrate import Meter, Settings, calibrate, digest, measurement_count, with_earlier
    from ..budgets.profile import dump
    from ..budgets.recall import goal_chunks
    from ..hf.geometry import geometry
    from ..hf.identity import fits
    from ..system.files import write_text

    if grid:
        Settings(kind, grid).check_averages(arguments.average)
    model, tokenizer = load_model(arguments)
    if by_head:
        check_heads(kind, model)
    default = 8 if by_head or model.device.type == "cuda" else 2
    chunks, text = read_chunks(arguments, model, tokenizer, arguments.chunks or default)
    chunks, counted = goal_chunks(arguments.goal, tokenizer, chunks)
    settings = _settings(arguments, kind, grid, model, chunks)
    settings.check(len(geometry(model)), chunks.shape[1], arguments.average)
    if earlier and not fits(output, model):
        raise ValueError(f"--output {output} holds a profile for another model; give another name")
    dtype = str(model.dtype).removeprefix("torch.")
    _check_same(output, earlier, dtype=dtype, grid=list(settings.grid), text=digest(chunks))
    meter = Meter(model, chunks, settings, f"{output}.measured.jsonl", arguments.goal, counted)
    averages = list(dict.fromkeys(arguments.average))
    known = len(meter.measurements.results)
    if not arguments.quiet:
        resumed = f"; {known} measurements are there already" if known else ""
        shape = f"{chunks.shape[0]} chunks of {chunks.shape[1]:,} tokens"
        note(f"{kind} on {shape}, capacities {', '.join(map(str, settings.grid))}{resumed}")
    count, work = (estimate_count, calibrate_by_head) if by_head else (measurement_count, calibrate)
    with progress(count(meter, averages), "", "loss", arguments.quiet) as bar:

        def on_measurement(what: str, loss: float) -> None:
            bar.set_description(what, refresh=False)
            bar.update()

        meter.on_measured = on_measurement
        profile = with_earlier(work(meter, averages, text, __version__), earlier)
    write_text(output, dump(profile))
    print(json.dumps(profile) if arguments.json else _text(profile, output))


def _earlier(output: Path) -> dict[str, Any]:
    """The profile that is there already; any other file is not replaced."""
    try:
        earlier = open_profile(output) if output.exists() else {}
    except ValueError as error:
        raise ValueError(f"--output {output} is there already and is no profile; give another name") from error
    if not _are_losses(earlier.get("losses", [])):
        raise ValueError(f'--output {output} is there already and its "losses" are damaged; give another name')
    return earlier


def _are_losses(given: object) -> bool:
    """Rows with an average and all losses."""
    names = ("average", *_COLUMNS)
    rows = given if isinstance(given, list) else [None]
    return all(isinstance(row, dict) and all(isinstance(row.get(name), int | float) for name in names) for row in rows)


def _check_same(output: Path, earlier: dict[str, Any], **ours: object) -> None:
    """Refuse to replace a profile that was made with other options, named here: its averages would be lost."""
    text = earlier.get("text")
    digest = text.get("tokens_sha256") if isinstance(text, dict) else None
    theirs = {"by": "layer"} | earlier | {"text": digest}
    for name, our in ours.items() if earlier else ():
        if theirs.get(name) != our:
            both = "" if name == "text" else f" ({theirs.get(name) or 'unknown'}, not {our})"
            raise ValueError(f"--output {output} holds a profile made with another --{name}{both}; give another name")


def _settings(
    arguments: Namespace, kind: str, grid: tuple[int, ...] | None, model: PreTrainedModel, chunks: Tensor
) -> Settings:
    from ..budgets.calibrate import Settings, default_grid

    factor, rounds = (2, 2) if model.device.type == "cuda" else (4, 0)
    rounds = 0 if arguments.by == "head" else rounds if arguments.rounds is None else arguments.rounds
    grid = grid or default_grid(chunks.shape[1], factor)
    return Settings(kind, grid, rounds, batch_size(arguments, model))


def _kind(text: str) -> str:
    """A policy without a size and without a profile."""
    policy = split_policy(text)
    if is_best(text):
        raise ValueError(f"--policy {text} takes a profile rather than making one; give a kind, e.g. fade")
    if policy.profile:
        raise ValueError(f"--policy {text} has a profile already; give the kind alone, e.g. {policy.kind}")
    check_policy_kind(text)
    return text


def _check_by_head(arguments: Namespace, kind: str) -> None:
    """What --by head cannot do, before a model is loaded."""
    check_by_head(kind)
    if arguments.rounds:
        raise ValueError(f"--rounds {arguments.rounds}: there are no joint moves --by head; leave out --rounds")


def _grid(text: str | None) -> tuple[int, ...] | None:
    """The capacities of --grid."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--grid {text!r} is not a list of whole numbers; write e.g. 16,64,256,1024") from None


_HEADER = ("average", "same for all {}", "this profile", "before joint moves", "sum of single {}")
_COLUMNS = ("uniform", "refined", "additive", "expected")


def _text(profile: dict[str, Any], output: Path) -> str:
    """The profile for a person: losses, capacities, and how to use it."""
    count, length = profile["text"]["chunks"]
    units = "heads" if profile.get("by") == "head" else "layers"
    losses = [(row["average"], *(f"{row[name]:.4f}" for name in _COLUMNS)) for row in profile["losses"]]
    policy = split_policy(profile["policy"]).with_size(profile["average"])
    worse = [str(row["average"]) for row in profile["losses"] if row["refined"] == row["uniform"] < row["additive"]]
    by_average = {profile["average"]: profile["capacities"]} | profile["allocations"]
    return "\n".join(
        [
            f"{output}: {profile['policy']} for {profile['model']['name']}, measured on {count} x {length:,} tokens, "
            f"for {profile['for']}",
            "loss over the full model, nats per token:",
            table(losses, tuple(title.format(units) for title in _HEADER)),
            *(
                f"average {each}: budgets measured worse than the same for all {units}, so all have the same"
                for each in worse
            ),
            *(
                f"capacities by layer, average {average}: {' '.join(map(_sizes, capacities))}"
                for average, capacities in by_average.items()
            ),
            f"use it: msrnn generate --policy {policy} --profile {output} ...",
        ]
    )


def _sizes(capacity: int | list[int]) -> str:
    """A layer's capacity, or those of its KV heads: `96/416/32`."""
    return str(capacity) if isinstance(capacity, int) else "/".join(map(str, capacity))
