"""`msrnn report`: one HTML page with all tables and figures of some results."""

from __future__ import annotations

from argparse import Namespace

from ..system.console import note
from . import options
from .argument_parser import Commands

_ABOUT = """\
Write one HTML page with every table and figure for which the results have data, the paper's numbers beside ours, the
conditions, and the command that reproduces each. The page needs no other file and no network.
"""
_EXAMPLES = """\
examples:
  msrnn report                               # everything in the folder results, where msrnn eval puts its records
  msrnn report results/pg19.jsonl traces/ -o report.html --title "PG-19 on my model"
  msrnn report results --markdown            # the tables alone, on standard output
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser("report", help="a page of tables and figures", description=_ABOUT, epilog=_EXAMPLES)
    options.add_results(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (default: report.html)")
    parser.add_argument("--title", type=str, default="msrnn: results", help="(default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown instead")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    from ..analysis.results import open_results

    if arguments.markdown and arguments.output:
        raise ValueError("--markdown prints tables and --output is for the page; give one of them")
    if arguments.markdown:
        from ..analysis.table import tables

        records = open_results(arguments.results).records
        print("\n".join(table.markdown() for table in tables(records)), end="")
        return
    page = options.check_output_file(arguments.output or "report.html", inputs=options.inputs(arguments))
    results = open_results(arguments.results)
    from ..analysis.report import report
    from ..system.files import write_text

    write_text(page, report(results, title=arguments.title))
    note(f"{len(results.records):,} records and {len(results.traces)} traces in {page} ({page.stat().st_size:,} bytes)")
