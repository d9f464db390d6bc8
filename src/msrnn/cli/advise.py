"""`msrnn advise`: the smallest capacity that is good enough for a model and a text, and what it is worth."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from ..budgets.tolerance import Bound
from ..policy import kind_of, profile_path
from ..system.progress import bar
from . import options
from .corpus import add_texts, batch_of, check_texts, read_chunks
from .session import open_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..budgets.advise import Reader, Verdict, Worth

KINDS = ("tova", "fade", "h2o", "window+4")
_ABOUT = """\
Find the smallest capacity per policy whose perplexity on your own text stays within so many points (or per cent) of the
full model's, and say what that capacity is worth: memory per sequence, largest batch, expected decoding gain. Reading
stops early wherever the chunks read so far decide already (their 99 % interval lies on one side of the bound).
"""
_MORE = """\
examples:
  msrnn advise --text notes.txt --within 0.4
  msrnn advise Qwen/Qwen3-0.6B --text contracts.txt --within 5% --memory 24GiB --dtype bfloat16
  msrnn advise --text book.txt --within 0.4 --policy tova --policy tova,profile=profile.json --json
"""
_NOTES = """\
over full: perplexity points, with the 99 % interval over the chunks that were read before the answer was clear.
state: bytes per sequence; a full cache takes {full} at {length:,} tokens. batch: sequences that fit into {memory} less
the weights ({weights}), activations not counted; with a full cache {full_batch:,}. gain: expected decoding speed over a
full cache at batch 1 and at these largest batches, from the bytes a step must read and nothing else; not timed here."""


def add(commands: options.Commands[options.Parser]) -> None:
    parser = commands.add_parser("advise", help="the capacity a text needs", description=_ABOUT, epilog=_MORE)
    options.add_model_place(parser)
    parser.add_argument("--within", required=True, metavar="X", help="perplexity points (0.4) or per cent (5%%)")
    kinds = "a policy without a size: tova, h2o-layer, tova,profile=FILE; may be repeated"
    parser.add_argument("--policy", action="append", metavar="KIND", help=f"{kinds} (default: {', '.join(KINDS)})")
    parser.add_argument("--memory", metavar="SIZE", help="for weights and states, e.g. 24GiB (default: the device's)")
    add_texts(parser, required=True, chunks="16")
    options.add_model(parser, option=False)
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    bound = Bound.parse(arguments.within)
    kinds = [kind_of(kind) for kind in arguments.policy or _kinds(arguments.model)]
    check_texts(arguments)

    from ..budgets.advise import Reader, smallest
    from ..hf.cost import parse_bytes

    asked = parse_bytes(arguments.memory) if arguments.memory else None
    model, tokenizer = open_model(arguments)
    chunks, _ = read_chunks(arguments, model, tokenizer, arguments.chunks or 16)
    with bar(None, "tok", arguments.quiet) as shown:

        def told(who: str, tokens: int) -> None:
            shown.set_description(who, refresh=False)
            shown.update(tokens)

        reader = Reader(model, chunks, batch_of(arguments, model), told)
        found = {kind: smallest(reader, kind, bound) for kind in kinds}
    memory = _memory(model) if asked is None else asked
    facts = _facts(reader, bound, memory) | {"policies": [_row(reader, *item, memory) for item in found.items()]}
    print(json.dumps(facts)) if arguments.json else _show(facts)


def _kinds(model: str | None) -> tuple[str, ...]:
    """The bundled model has a profile of its own, which comes with the package."""
    own = "SmolLM2-135M-Instruct"
    return (*KINDS, f"tova,profile={own}") if model is None and profile_path(own).is_file() else KINDS


def _memory(model: PreTrainedModel) -> int:
    """Of the device: the GPU's, or this machine's."""
    import torch

    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _facts(reader: Reader, bound: Bound, memory: int) -> dict[str, Any]:
    count, length = reader.chunks.shape
    return {
        "model": str(reader.model.config.name_or_path),
        "dtype": str(reader.model.dtype).removeprefix("torch."),
        "within": str(bound),
        "chunks": count,
        "length": length,
        "full_perplexity": round(reader.perplexity, 4),
        "memory_bytes": memory,
    }


def _row(reader: Reader, kind: str, verdict: Verdict, memory: int) -> dict[str, Any]:
    """One policy's answer; points are of the full model's perplexity over the whole text."""
    from ..budgets.advise import worth

    value: Worth = worth(reader, kind, verdict.capacity, memory)
    points = [reader.perplexity * math.expm1(nats) for nats in (verdict.mean, verdict.low, verdict.high)]
    over, low, high = (round(point, 4) if math.isfinite(point) else None for point in points)
    bounded, full = value.batches
    return {
        "policy": kind,
        "capacity": verdict.capacity,
        "over_full": over,
        "interval": [low, high],
        "chunks_read": verdict.chunks,
        "state_bytes": value.price.state,
        "full_bytes": value.price.full,
        "weight_bytes": value.weights,
        "batch": bounded,
        "full_batch": full,
        "gain_batch_1": round(value.single_gain, 3),
        "gain_largest_batch": None if value.batch_gain is None else round(value.batch_gain, 3),
    }


def _show(facts: dict[str, Any]) -> None:
    from ..hf.cost import human

    print(f"{facts['model']} ({facts['dtype']}), {facts['chunks']} chunks of {facts['length']:,} tokens")
    print(f"full: perplexity {facts['full_perplexity']:.2f}; asked for: within {facts['within']}\n")
    head = ("policy", "capacity", "over full", "chunks", "state", "batch", "gain 1", "gain max")
    table = [head, *(_cells(row, facts["length"]) for row in facts["policies"])]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    for line in table:
        print("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]))
    one = facts["policies"][0]
    sizes = {"full": human(one["full_bytes"]), "memory": human(facts["memory_bytes"])}
    sizes |= {"weights": human(one["weight_bytes"])}
    print("\n" + _NOTES.format(length=facts["length"], full_batch=one["full_batch"], **sizes))


def _cells(row: dict[str, Any], length: int) -> tuple[str, ...]:
    from ..hf.cost import human

    low, high = row["interval"]
    over = f"{row['over_full']:+.2f}" + ("" if low is None else f" ({low:+.2f} to {high:+.2f})")
    most = "-" if row["gain_largest_batch"] is None else f"{row['gain_largest_batch']:.2f}x"
    if row["capacity"] == length:
        return (row["policy"], "full", "no smaller one is", "", human(row["state_bytes"]), f"{row['batch']:,}", "", "")
    numbers = (f"{row['capacity']:,}", over, f"{row['chunks_read']}", human(row["state_bytes"]), f"{row['batch']:,}")
    return (row["policy"], *numbers, f"{row['gain_batch_1']:.2f}x", most)
