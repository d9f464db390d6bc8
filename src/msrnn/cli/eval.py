"""`msrnn eval`: run an experiment and add its records to a file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..system.console import note, table
from . import options
from .argument_parser import Commands, integer, number
from .session import load_model

if TYPE_CHECKING:
    from ..eval.experiment import Experiment
    from ..eval.record import Record

_ABOUT = """\
Run an experiment: a task and policies, from a TOML file (experiments/ has those of the paper). Every finished sample
is kept in a log beside the records, so a run that was stopped resumes. Records are added to --out as JSON lines, and a
table of them is printed.
"""
_EXAMPLES = """\
examples:
  msrnn eval experiments/pg19.toml --data texts --limit 8
  msrnn eval experiments/pg19.toml --data texts --dtype bfloat16 --batch 64 --out results/pg19.jsonl
  msrnn eval experiments/needle.toml --data texts --policy full --policy tova:256
  msrnn eval experiments/qasper.toml --model Qwen/Qwen3-0.6B --minutes 30

--data is a folder with pg19/*.txt, squality/*.jsonl and qasper/*.jsonl; without it, the datasets library fetches the
public sets by their names.
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser("eval", help="run an experiment of the paper", description=_ABOUT, epilog=_EXAMPLES)
    parser.add_argument("experiment", metavar="FILE", help="a TOML file, e.g. experiments/pg19.toml")
    parser.add_argument("--data", metavar="FOLDER", help="where the texts are (default: the datasets library)")
    parser.add_argument("--out", metavar="FILE", help="where records go (default: results/NAME.jsonl)")
    parser.add_argument(
        "--limit", type=integer(1), metavar="N", help="at most N samples, spread over books or documents"
    )
    parser.add_argument("--batch", type=integer(1), metavar="N", help="samples at once")
    parser.add_argument("--minutes", type=number(0), metavar="X", help="start no new batch after this time")
    parser.add_argument(
        "--policy", action="append", metavar="POLICY", help="instead of the file's policies; may be given several times"
    )
    options.add_engine(parser, "generate answers")
    parser.add_argument("--seed", type=integer(0), metavar="N", help="of samples and intervals (default: 0)")
    options.add_model(parser)
    options.add_output(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    experiment = _experiment(arguments)
    out = Path(arguments.out or Path("results") / f"{Path(arguments.experiment).stem}.jsonl")
    if out.suffix != ".jsonl":
        raise ValueError(f"--out {out}: records are JSON lines; give a name that ends in .jsonl")

    from ..eval.run import run as run_experiment
    from ..eval.sample_log import SampleLog

    arguments.model, arguments.dtype = experiment.model, experiment.dtype
    options.check_record_output(out, "--out", options.inputs(arguments))
    SampleLog.open(out.with_suffix(".samples.jsonl"), run="")  # what is no log says so now
    model, tokenizer = load_model(arguments)
    records = run_experiment(experiment, model, tokenizer, out, minutes=arguments.minutes, quiet=arguments.quiet)
    if arguments.json:
        _print_json(records)
    else:
        print(_table(records))
    if not arguments.quiet:
        note(
            f"{len(records):,} records in {out}"
            if records
            else "no sample was done by every policy yet; run it again to continue"
        )


def _experiment(arguments: Namespace) -> Experiment:
    """The file's experiment, with the options of the command line in place of its settings."""
    from ..eval.experiment import read_experiment
    from ..eval.tasks import settings

    experiment = read_experiment(arguments.experiment, settings())
    overrides = {name: getattr(arguments, name) for name in ("model", "data", "limit", "batch", "seed")}
    changes = {name: value for name, value in overrides.items() if value is not None}
    if arguments.dtype != "auto":
        changes["dtype"] = arguments.dtype
    if arguments.engine != "auto":
        changes["engine"] = arguments.engine == "on"
    if arguments.policy:
        changes["policies"] = tuple(arguments.policy)
    experiment = replace(experiment, **changes)
    experiment.entries()  # refuses policies that cannot be parsed
    if experiment.data is not None and not Path(experiment.data).is_dir():
        raise ValueError(
            f"--data {experiment.data} is not a folder; give one, or leave it out to fetch the public sets"
        )
    return experiment


def _print_json(records: Iterable[Record]) -> None:
    import json
    from dataclasses import asdict

    for record in records:
        print(json.dumps(asdict(record), ensure_ascii=False))


def _table(records: Iterable[Record]) -> str:
    """One line per record, with the interval beside the value."""
    rows = []
    for record in records:
        cell = " ".join(f"{name}={value}" for name, value in record.cell.items())
        interval = "" if record.low is None or record.high is None else f"{record.low:.4g} to {record.high:.4g}"
        rows.append((record.policy, cell, record.metric, f"{record.value:.4f}", interval, record.samples))
    return table(rows, ("policy", "", "metric", "value", "95 % interval", "samples"))
