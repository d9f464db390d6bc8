"""`msrnn plot`: figures from results; nothing is measured."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..system.console import note
from . import options
from .argument_parser import Commands

_ABOUT = """\
Draw every figure for which the results have data: records (*.jsonl) of msrnn eval, retention and of our benchmarks,
traces (*.safetensors) of msrnn trace, and folders of both.
"""
_EXAMPLES = """\
figures of records: perplexity, score, running, retention, words, throughput, serving, vllm, needle,
                    turns, ruler, peers, league
figures of traces:  map, layers, agreement

examples:
  msrnn plot results -o figures
  msrnn plot results/pg19.jsonl -o figures --figure perplexity --format svg
  msrnn plot trace.safetensors -o figures --figure layers
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser("plot", help="figures from results", description=_ABOUT, epilog=_EXAMPLES)
    options.add_results(parser)
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="the folder for the figures")
    parser.add_argument("--figure", metavar="NAME", help="this one only (default: all for which there is data)")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png", help="(default: png)")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    from ..analysis.figures import check_name, draw, draw_trace
    from ..analysis.results import load_trace, open_results

    check_name(arguments.figure)
    results = open_results(arguments.results)
    settings = {"only": arguments.figure, "kind": arguments.format}
    count = 0
    with _folder(Path(arguments.output)) as folder:
        for name, _, file in draw(results.records, folder, **settings):
            print(file)
            count += bool(name)
        for path in results.traces:
            for _, file in draw_trace(load_trace(path), path.stem, folder, **settings):
                print(file)
                count += 1
    if not count:
        figure = f"the figure {arguments.figure!r}" if arguments.figure else "any figure"
        raise ValueError(f"{len(results.records)} records and {len(results.traces)} traces have nothing for {figure}")
    note(f"{count} figures from {len(results.records):,} records and {len(results.traces)} traces")


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """The folder for figures, made where it is missing; one that stays empty is removed again."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output {path} is a file; give a folder")
    new = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        with suppress(OSError):  # it holds something
            for one in new:
                one.rmdir()
