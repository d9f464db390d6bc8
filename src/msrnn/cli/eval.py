"""`msrnn eval`: run an experiment and add its records to a file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import options
from .session import device_of, hush, note

if TYPE_CHECKING:
    from ..eval.experiment import Experiment
    from ..eval.record import Record

_ABOUT = """\
Run an experiment: a task and policies, from a TOML file (experiments/ has those of the paper). Every finished sample
is kept in a log beside the records, so a run that was stopped goes on where it was. Records are added to --out as JSON
lines, and a table of them is printed.
"""
_MORE = """\
examples:
  msrnn eval experiments/pg19.toml --data texts --limit 8
  msrnn eval experiments/pg19.toml --data texts --dtype bfloat16 --batch 64 --out results/pg19.jsonl
  msrnn eval experiments/needle.toml --data texts --policy full --policy tova:256
  msrnn eval experiments/qasper.toml --model Qwen/Qwen3-0.6B --minutes 30

--data is a folder with pg19/*.txt, squality/*.jsonl and qasper/*.jsonl; without it, the datasets library fetches the
public sets by their names.
"""


def add(commands: options.Commands[options.Parser]) -> None:
    parser = commands.add_parser("eval", help="run an experiment of the paper", description=_ABOUT, epilog=_MORE)
    parser.add_argument("experiment", metavar="FILE", help="a TOML file, e.g. experiments/pg19.toml")
    parser.add_argument("--data", metavar="FOLDER", help="where the texts are (default: the datasets library)")
    parser.add_argument("--out", metavar="FILE", help="where records go (default: results/NAME.jsonl)")
    parser.add_argument("--limit", type=options.whole(1), metavar="N", help="so many samples at most, from all groups")
    parser.add_argument("--batch", type=options.whole(1), metavar="N", help="samples at once")
    parser.add_argument("--minutes", type=options.number(0), metavar="X", help="begin no batch after this time")
    parser.add_argument(
        "--policy", action="append", metavar="POLICY", help="instead of the file's policies; may be given several times"
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "on", "off"),
        default="auto",
        help="write answers with msrnn's engine, or with transformers' generate (default: on a GPU)",
    )
    parser.add_argument("--seed", type=options.whole(0), metavar="N", help="of samples and intervals (default: 0)")
    options.add_model(parser)
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    experiment = _experiment(arguments)
    out = Path(arguments.out or Path("results") / f"{Path(arguments.experiment).stem}.jsonl")
    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out}: records are JSON lines; give a name that ends in .jsonl")

    import torch

    from ..eval.run import run as go
    from ..hf.load import load

    hush()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model, tokenizer = load(
        experiment.model,
        dtype=experiment.dtype,
        device=device_of(arguments.device),
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
    )
    records = go(experiment, model, tokenizer, out, minutes=arguments.minutes, quiet=arguments.quiet)
    if arguments.json:
        _print_json(records)
    else:
        print(table(records))
    if not arguments.quiet:
        note(f"{len(records):,} records in {out}" if records else "no sample was done by every policy yet; go on later")


def _experiment(arguments: Namespace) -> Experiment:
    """The file's experiment with what the command line changes."""
    from ..eval.experiment import read_experiment
    from ..eval.tasks import settings

    made = read_experiment(arguments.experiment, settings())
    given = {name: getattr(arguments, name) for name in ("model", "data", "limit", "batch", "seed")}
    changes = {name: value for name, value in given.items() if value is not None}
    if arguments.dtype != "auto":
        changes["dtype"] = arguments.dtype
    if arguments.engine != "auto":
        changes["engine"] = arguments.engine == "on"
    if arguments.policy:
        changes["policies"] = tuple(arguments.policy)
    made = replace(made, **changes)
    made.entries()
    if made.data is not None and not Path(made.data).is_dir():
        raise ValueError(f"--data {made.data} is not a folder; give one, or leave it out to fetch the public sets")
    return made


def _print_json(records: Iterable[Record]) -> None:
    import json
    from dataclasses import asdict

    for record in records:
        print(json.dumps(asdict(record), ensure_ascii=False))


def table(records: Iterable[Record]) -> str:
    """One line per record, aligned; the interval beside the value."""
    rows = [("policy", "", "metric", "value", "95 % interval", "samples")]
    for one in records:
        cell = " ".join(f"{name}={value}" for name, value in one.cell.items())
        sure = "" if one.low is None or one.high is None else f"{one.low:.4g} to {one.high:.4g}"
        rows.append((one.policy, cell, one.metric, f"{one.value:.4f}", sure, f"{one.samples:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
