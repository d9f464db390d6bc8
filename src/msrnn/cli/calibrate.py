"""`msrnn calibrate`: measure which layers need slots, and write a profile that spends them there."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..policy import kind_of, split_profile
from ..system.progress import bar
from . import options
from .corpus import add_texts, batch_of, check_texts, read_chunks
from .session import note, open_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..budgets.calibrate import Settings

_ABOUT = """\
Measure on a text how the loss grows as each single layer shrinks (the others full), and spend an average number of
slots per layer where it buys most. The profile that this writes gives every layer its own capacity at the same total
memory as the plain policy; it names the model it was made for and refuses others. A run that was killed goes on where
it was when the same command is given again: measurements are kept beside the profile, in OUTPUT.measured.jsonl, and
another --average uses them too.
"""
_MORE = """\
examples:
  msrnn calibrate --average 256 -o profile.json
  msrnn calibrate Qwen/Qwen3-0.6B --text a.txt --text b.txt --average 256 --average 512 -o profile.json
  msrnn generate -f book.txt --policy tova:256 --profile profile.json
  msrnn calibrate --policy h2o-layer --length 1024 --chunks 2 --grid 16,64,256 --rounds 0 --average 64 -o quick.json

On a GPU 8 chunks of 4,096 tokens and capacities that double are measured, then 2 rounds of joint moves; on a CPU
2 chunks of 2,048 tokens, capacities that quadruple, and no joint moves. The bar says how long it will take.
"""


def add(commands: options.Commands[options.Parser]) -> None:
    parser = commands.add_parser("calibrate", help="one capacity per layer", description=_ABOUT, epilog=_MORE)
    options.add_model_place(parser)
    size = "slots per layer, on average; may be repeated, for a profile of several sizes"
    parser.add_argument("--average", action="append", required=True, type=options.whole(1), metavar="N", help=size)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="where the profile goes")
    parser.add_argument("--policy", default="tova", metavar="KIND", help="a policy without a size (default: tova)")
    parser.add_argument("--grid", metavar="N,N,...", help="capacities to try (default: up to half of a chunk)")
    parser.add_argument(
        "--rounds", type=options.whole(0), metavar="N", help="joint moves (default: 2 on a GPU, else 0)"
    )
    add_texts(parser, required=False, chunks="8 on a GPU, else 2")
    options.add_model(parser, option=False)
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    kind, grid, output = _kind(arguments.policy), _grid(arguments.grid), Path(arguments.output)
    _check_output(output)
    check_texts(arguments)

    from .. import __version__
    from ..budgets.calibrate import Meter, calibrate, measurements
    from ..budgets.profile import dump
    from ..hf.cache import geometry
    from ..system.files import write_text

    model, tokenizer = open_model(arguments)
    quick = model.device.type != "cuda"
    chunks, text = read_chunks(arguments, model, tokenizer, arguments.chunks or (2 if quick else 8))
    settings = _settings(arguments, kind, grid, model, chunks)
    averages = list(dict.fromkeys(arguments.average))
    settings.check(len(geometry(model)), chunks.shape[1], averages)
    meter = Meter(model, chunks, settings, f"{output}.measured.jsonl")
    known = len(meter.ledger.known)
    if not arguments.quiet:
        gone_on = f"; {known} measurements are there already" if known else ""
        shape = f"{chunks.shape[0]} chunks of {chunks.shape[1]:,} tokens"
        note(f"{kind} on {shape}, capacities {', '.join(map(str, settings.grid))}{gone_on}")
    with bar(measurements(meter, averages), "loss", arguments.quiet) as shown:

        def told(what: str, loss: float) -> None:
            shown.set_description(what, refresh=False)
            shown.update()

        meter.told = told
        profile = calibrate(meter, averages, text, __version__)
    write_text(output, dump(profile))
    print(json.dumps(profile)) if arguments.json else _show(profile, output)


def _settings(
    arguments: Namespace, kind: str, grid: tuple[int, ...] | None, model: PreTrainedModel, chunks: Tensor
) -> Settings:
    from ..budgets.calibrate import Settings, default_grid

    quick = model.device.type != "cuda"
    chosen = grid or default_grid(chunks.shape[1], 4 if quick else 2)
    rounds = (0 if quick else 2) if arguments.rounds is None else arguments.rounds
    return Settings(kind, chosen, rounds, batch_of(arguments, model))


def _kind(text: str) -> str:
    if split_profile(text)[1]:
        raise ValueError(f"--policy {text} has a profile already; give the kind alone, e.g. {split_profile(text)[0]}")
    return kind_of(text)


def _grid(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--grid {text!r} is not a list of whole numbers; write e.g. 16,64,256,1024") from None


def _check_output(path: Path) -> None:
    """Refuse a place that cannot be written to now, not after the measuring."""
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no folder {path.parent}; make it first")


def _show(profile: dict[str, Any], output: Path) -> None:
    count, length = profile["text"]["chunks"]
    print(f"{output}: {profile['policy']} for {profile['model']['name']}, measured on {count} x {length:,} tokens")
    print("loss over the full model, nats per token:")
    print("average  every layer alike  this profile  before joint moves  sum of single layers")
    for row in profile["losses"]:
        before = (row["uniform"], row["refined"], row["additive"], row["expected"])
        print(f"{row['average']:7}  {before[0]:17.4f}  {before[1]:12.4f}  {before[2]:18.4f}  {before[3]:20.4f}")
    by_average = {profile["average"]: profile["capacities"]} | profile["allocations"]
    for average, capacities in by_average.items():
        print(f"capacities by layer, average {average}: {' '.join(map(str, capacities))}")
    print(f"use it: msrnn generate --policy {profile['policy']}:{profile['average']} --profile {output} ...")
