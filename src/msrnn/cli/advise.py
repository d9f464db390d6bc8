"""`msrnn advise`: the smallest capacity that is good enough for a model and a text, and what it saves."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from ..budgets.profile import check_policy_kind
from ..budgets.tolerance import Tolerance
from ..system.console import progress, table
from . import options
from .argument_parser import Commands, size
from .corpus import add_texts, batch_size, check_texts, read_chunks
from .session import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..budgets.advise import Comparator, Comparison

KINDS = ("best", "tova", "fade", "h2o", "window+4")
_ABOUT = """\
Find the smallest capacity per policy whose perplexity on your own text stays within so many points (or per cent) of the
full model's, and say what that capacity saves: memory per sequence, largest batch, expected decoding speedup. A
capacity is tried on as few chunks as decide it (their 99 % interval lies on one side of the tolerance).
"""
_EXAMPLES = """\
examples:
  msrnn advise --text notes.txt --within 0.4
  msrnn advise Qwen/Qwen3-0.6B --text contracts.txt --within 5% --memory 24GiB --dtype bfloat16
  msrnn advise --text book.txt --within 0.4 --policy tova --policy tova,profile=profile.json --json
"""
_NOTES = """\
capacity: slots per layer on average; of best, the plain slots whose bytes it takes. over full: perplexity points, with
the 99 % interval over the chunks that were read before the answer was clear. state: bytes per sequence; a full cache
takes {full} at {length:,} tokens. batch: sequences that fit into {memory} less the weights ({weights}), activations not
counted; with a full cache {full_batch:,}. gain: expected decoding speed over a full cache at batch 1 and at these
largest batches, from the bytes a step must read and nothing else; not timed here."""


def add(commands: Commands) -> None:
    parser = commands.add_parser("advise", help="the capacity a text needs", description=_ABOUT, epilog=_EXAMPLES)
    options.add_model_argument(parser)
    parser.add_argument(
        "--within",
        required=True,
        metavar="X",
        help="how much worse than full attention is acceptable: perplexity points (0.4) or per cent (5%%)",
    )
    kinds = "a policy without a size: best, tova, h2o-layer, tova,profile=FILE; may be repeated"
    parser.add_argument("--policy", action="append", metavar="KIND", help=f"{kinds} (default: {', '.join(KINDS)})")
    about = "for weights and states, e.g. 24GiB (default: the device's)"
    parser.add_argument("--memory", type=size, metavar="SIZE", help=about)
    add_texts(parser, required=True, chunks="16")
    options.add_model(parser, option=False)
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    try:
        tolerance = Tolerance.parse(arguments.within)
    except ValueError as error:
        raise ValueError(f"--within {error}") from None
    kinds = arguments.policy or KINDS
    for kind in kinds:
        check_policy_kind(kind)
    check_texts(arguments)

    from ..budgets.advise import Comparator, smallest

    model, tokenizer = load_model(arguments)
    chunks, _ = read_chunks(arguments, model, tokenizer, arguments.chunks or 16)
    with progress(None, "", "tok", arguments.quiet) as bar:

        def on_chunks(policy: str, tokens: int) -> None:
            bar.set_description(policy, refresh=False)
            bar.update(tokens)

        comparator = Comparator(model, chunks, batch_size(arguments, model), on_chunks)
        best = {kind: smallest(comparator, kind, tolerance) for kind in kinds}
    memory = _device_memory(model) if arguments.memory is None else arguments.memory
    rows = [_row(comparator, kind, comparison, memory) for kind, comparison in best.items()]
    facts = _facts(comparator, tolerance, memory) | {"policies": rows}
    print(json.dumps(facts) if arguments.json else _text(facts))


def _device_memory(model: PreTrainedModel) -> int:
    """Bytes of the GPU's memory, or of this machine's."""
    import torch

    from ..system.memory import physical

    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[1])
    return physical()


def _facts(comparator: Comparator, tolerance: Tolerance, memory: int) -> dict[str, Any]:
    """The conditions, as --json prints them."""
    count, length = comparator.chunks.shape
    return {
        "model": str(comparator.model.config.name_or_path),
        "dtype": str(comparator.model.dtype).removeprefix("torch."),
        "within": str(tolerance),
        "chunks": count,
        "length": length,
        "full_perplexity": round(comparator.perplexity, 4),
        "memory_bytes": memory,
    }


def _row(comparator: Comparator, kind: str, comparison: Comparison, memory: int) -> dict[str, Any]:
    """The result of one policy; points are of the full model's perplexity over the whole text."""
    from ..budgets.advise import savings

    saved = savings(comparator, kind, comparison.capacity, memory)
    interval = (comparison.mean, comparison.low, comparison.high)
    points = [comparator.perplexity * math.expm1(nats) for nats in interval]
    over, low, high = (round(point, 4) if math.isfinite(point) else None for point in points)
    bounded, full = saved.batches
    return {
        "policy": kind,
        "capacity": comparison.capacity,
        "over_full": over,
        "interval": [low, high],
        "chunks_read": comparison.chunks,
        "state_bytes": saved.cost.state,
        "full_bytes": saved.cost.full,
        "weight_bytes": saved.weights,
        "batch": bounded,
        "full_batch": full,
        "gain_batch_1": round(saved.single_speedup, 3),
        "gain_largest_batch": None if saved.batch_speedup is None else round(saved.batch_speedup, 3),
    }


_HEADER = ("policy", "capacity", "over full", "chunks", "state", "batch", "gain 1", "gain max")


def _text(facts: dict[str, Any]) -> str:
    """The facts for a person: conditions, a table, and what its columns mean."""
    from ..system.sizes import human

    first = facts["policies"][0]
    sizes = {"full": human(first["full_bytes"]), "memory": human(facts["memory_bytes"])}
    sizes |= {"weights": human(first["weight_bytes"])}
    return "\n".join(
        [
            f"{facts['model']} ({facts['dtype']}), {facts['chunks']} chunks of {facts['length']:,} tokens",
            f"full: perplexity {facts['full_perplexity']:.2f}; asked for: within {facts['within']}",
            "",
            table([_cells(row, facts["length"]) for row in facts["policies"]], _HEADER),
            "",
            _NOTES.format(length=facts["length"], full_batch=first["full_batch"], **sizes),
        ]
    )


def _cells(row: dict[str, Any], length: int) -> tuple[str, ...]:
    from ..system.sizes import human

    low, high = row["interval"]
    over = f"{row['over_full']:+.2f}" + ("" if low is None or high is None else f" ({low:+.2f} to {high:+.2f})")
    largest = "-" if row["gain_largest_batch"] is None else f"{row['gain_largest_batch']:.2f}x"
    if row["capacity"] == length:
        return (row["policy"], "full", "no smaller one is", "", human(row["state_bytes"]), f"{row['batch']:,}", "", "")
    numbers = (f"{row['capacity']:,}", over, f"{row['chunks_read']}", human(row["state_bytes"]), f"{row['batch']:,}")
    return (row["policy"], *numbers, f"{row['gain_batch_1']:.2f}x", largest)
