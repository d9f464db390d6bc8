"""`msrnn bench`: the paper's table of memory, batch and speed, and what lies behind it, on this machine."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from ..system.console import note, progress, table
from . import options
from .argument_parser import Commands, integer
from .session import resolve_device, silence_transformers

if TYPE_CHECKING:
    import torch

    from ..bench.run import Settings

_ABOUT = """\
Memory, largest batch and speed of bounded states on this machine, against the same engine with a full cache. The
weights are random. Decoding speed does not depend on them; prefill is slower than with trained weights, as flat
attention is the scan's worst case. Kernels are checked first; where one is wrong, no speed is printed.
"""
_EXAMPLES = """\
parts:
  table     largest batch that fits and its tokens/s, as in the paper's table 1
  same      the same batch for all
  prefill   reading a prompt exactly, against one pass of full attention
  generate  transformers' own generate, for the record

examples:
  msrnn bench --shape llama-2-7b
  msrnn bench --shape llama-3-8b --parts same prefill --batch 1 48 --length 4096 65536 -o bench.jsonl
  msrnn bench --shape tiny --device cpu
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="memory and speed on this machine", description=_ABOUT, epilog=_EXAMPLES)
    parser.add_argument(
        "--shape", default="tiny", help="tiny, llama-2-7b, llama-3-8b, a hub name or a folder (default: tiny)"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("table", "same", "prefill", "generate"),
        metavar="PART",
        default=["table", "same", "prefill"],
        help="what to measure (default: table same prefill)",
    )
    parser.add_argument("--policy", nargs="+", metavar="POLICY", help="default: tova at 1/16 to 1/2 of the context")
    parser.add_argument(
        "--context", type=integer(2), metavar="N", help="tokens of context when decoding (default: 4096; tiny: 64)"
    )
    parser.add_argument(
        "--batch",
        type=integer(1),
        nargs="+",
        metavar="N",
        help="batch sizes (default: 1 48 for decoding, 1 8 32 64 for prompts; tiny: 1 4)",
    )
    parser.add_argument(
        "--length",
        type=integer(1),
        nargs="+",
        metavar="N",
        help="prompt lengths (default: 1024 4096 16384 65536 131072; tiny: 64)",
    )
    parser.add_argument(
        "--most",
        type=integer(1),
        default=2**17,
        metavar="N",
        help="leave out prompts with more tokens than this in all, length x batch (default: 131072)",
    )
    parser.add_argument(
        "--chunk",
        type=integer(1),
        default=256,
        metavar="N",
        help="prompt tokens per scan; pipelined prefill has chunks of its own (default: 256)",
    )
    parser.add_argument(
        "--runs", type=integer(1), default=5, metavar="N", help="timed runs; the median counts (default: 5)"
    )
    parser.add_argument("--compiled", action="store_true", help="let torch.compile fuse small operations")
    parser.add_argument("--dtype", choices=options.DTYPES[1:], help="default: bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    parser.add_argument("-o", "--output", metavar="FILE", help="add the records to this file, one JSON object a line")
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    import torch

    from ..bench import gate, measure, shapes
    from ..bench import run as runs
    from ..eval.record import append_lines, read_lines

    if arguments.output:
        options.check_record_output(arguments.output, inputs=options.inputs(arguments), read=read_lines)
    device = torch.device(resolve_device(arguments.device))
    silence_transformers()
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    shapes.config(arguments.shape)
    settings = _settings(arguments, dtype)  # refuses what cannot be measured before anything is computed
    passed = gate.check(device)
    if not arguments.quiet:
        note(f"{passed} checks of the kernels passed on {device}")
    model = shapes.make(arguments.shape, dtype, str(device))
    settings = replace(settings, bytes_per_second=measure.bandwidth(device))
    shared = measure.conditions(device, shape=arguments.shape, dtype=str(dtype)[6:], weights="random",
                                copy_bytes_per_s=settings.bytes_per_second)  # fmt: skip
    bar = progress(runs.count(arguments.parts, settings), "bench", "figure", arguments.quiet)
    records = []
    with bar:
        for record in runs.run(model, arguments.parts, settings):
            records.append(record)
            if arguments.output:  # one by one, so that an interrupted run keeps its first ones
                append_lines(arguments.output, [shared | record])
            bar.set_postfix_str(f"{record['policy']}, {record['part']}")
            bar.update()
    if arguments.json:
        print(json.dumps({"conditions": shared, "records": records}))
        return
    print(f"{arguments.shape}, random weights, {str(dtype)[6:]}, {shared['machine']}, torch {torch.__version__}")
    print(_table(records))


def _settings(arguments: Namespace, dtype: torch.dtype) -> Settings:
    from ..bench.run import Settings
    from ..bench.shapes import config
    from ..hf.best import resolve
    from ..policy import parse_policy

    small = arguments.shape == "tiny"
    lengths = arguments.length or ((64,) if small else (1024, 4096, 16384, 65536, 131072))
    batches = arguments.batch or ((1, 4) if small else (1, 8, 32, 64))
    prompts = tuple(pair for pair in product(lengths, batches) if math.prod(pair) <= arguments.most)
    if "prefill" in arguments.parts and not prompts:
        raise ValueError(
            f"every prompt has more than {arguments.most:,} tokens; give a larger --most or a shorter --length"
        )
    context = arguments.context or (64 if small else 4096)
    sizes = [f"tova:1/{part}" for part in (16, 8, 4, 2)]
    policies = tuple(
        str(parse_policy(str(resolve(text, config(arguments.shape), dtype=dtype, length=context)), length=context))
        for text in arguments.policy or sizes
    )
    return Settings(
        policies=tuple(dict.fromkeys(policies)),
        context=context,
        batches=tuple(arguments.batch or ((1, 4) if small else (1, 48))),
        prompts=prompts,
        chunk=arguments.chunk,
        runs=arguments.runs,
        compiled=arguments.compiled,
    )


_HEADER = ("part", "policy", "batch", "tokens", "KV a sequence", "ms", "tokens/s", "x full", "x floor")


def _table(records: list[dict[str, Any]]) -> str:
    return table(map(_cells, records), _HEADER)


def _cells(record: dict[str, Any]) -> list[str]:
    from ..system.sizes import human

    conditions = [record["part"], record["policy"], str(record.get("batch", "-"))]
    conditions.append(f"{record.get('context', record.get('length', 0)):,}")
    if record.get("out_of_memory"):
        return [*conditions, "out of memory", "-", "-", "-", "-"]
    state = human(record["state_bytes"] / record["batch"]) if "state_bytes" in record else "-"
    speed = [f"{1e3 * record['median_s']:.2f}", f"{record['tokens_per_s']:,.0f}"]
    return [*conditions, state, *speed, *(_ratio(record.get(name)) for name in ("times_full", "times_floor"))]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
