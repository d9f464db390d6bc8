"""`msrnn retention`: which tokens are kept, measured on texts and written as records."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..system.console import note, progress
from ..system.text import read_blocks
from . import options
from .argument_parser import Commands, integer
from .session import load_model

if TYPE_CHECKING:
    from ..eval.perplexity import Progress
    from ..eval.record import Record

_ABOUT = """\
Read texts under one or several policies and write records of what was kept: the share of recent tokens, the first token
and tokens 2 to 25, survival by age, mean steps kept by word class (Penn tags), agreement of layers and of heads.
Policies of one capacity are compared with the first of them. msrnn plot and msrnn report show the records.
"""
_EXAMPLES = """\
examples:
  msrnn retention book.txt --policy tova:256 -o results/retention.jsonl
  msrnn retention books/ --policy tova:256 --policy tova-head:256 --traces traces -o results/retention.jsonl
  msrnn plot results/retention.jsonl traces -o figures
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "retention", help="which kinds of tokens are kept", description=_ABOUT, epilog=_EXAMPLES
    )
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="UTF-8 text files, or folders of *.txt")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="records are added to this file")
    parser.add_argument("--policy", action="append", metavar="POLICY", help="may be given again (default: tova:256)")
    parser.add_argument(
        "--tokens", type=integer(2), default=4096, metavar="N", help="read N tokens of each (default: 4096)"
    )
    parser.add_argument("--traces", metavar="DIR", help="save a trace of every text here, and reuse those that exist")
    parser.add_argument("--no-words", action="store_true", help="leave word classes out; the tagger is not needed")
    options.add_model(parser)
    options.add_quiet(parser)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    policies = list(dict.fromkeys(map(_spelling, arguments.policy or ["tova:256"])))
    output = options.check_record_output(arguments.output, inputs=options.inputs(arguments))
    texts = read_texts(arguments.texts)

    from ..analysis.measure import measure
    from ..eval.record import write_records

    model, tokenizer = load_model(arguments)
    bars = Bars(arguments.tokens, arguments.quiet)
    settings = {"length": arguments.tokens, "words": not arguments.no_words, "traces": arguments.traces}
    records = measure(model, tokenizer, texts, policies, progress=bars, **settings)
    new = write_records(output, records)
    _print_tables(records)
    if not arguments.quiet:
        note(f"{len(new)} records in {output}; see them with msrnn plot {output} -o figures")


def _spelling(text: str) -> str:
    """The policy as it is usually written; a profile and `best` stay as they are, until the model is known."""
    from ..eval.experiment import entry
    from ..policy import is_best, parse_policy, split_policy

    return entry(text).label if split_policy(text).profile or is_best(text) else str(parse_policy(text))


class Bars:
    """A progress bar for each text and policy, which disappears at its end."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total, self.quiet = total, quiet

    def __call__(self, description: str) -> Progress | None:
        bar = progress(self.total, description, "tok", self.quiet)

        def update(count: int) -> None:
            bar.update(count)
            if bar.n >= bar.total:
                bar.close()

        return update


def read_texts(names: Iterable[str]) -> dict[str, str]:
    """The texts by their names, which records and traces tell them apart by."""
    files = dict[str, Path]()
    for path in (path for name in names for path in text_files(name)):
        other = files.setdefault(path.stem, path)
        if not other.samefile(path):
            raise ValueError(f"{other} and {path} are both called {path.stem} in records; rename one of them")
    return {name: read_text(path) for name, path in files.items()}


def text_files(name: str) -> list[Path]:
    """The file, or the *.txt of the folder."""
    path = Path(name)
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise ValueError(f"{name} has no *.txt; give text files, or a folder that has some")
        return files
    if not path.exists():
        raise ValueError(f"there is no file {name}; give text files, or folders of *.txt")
    return [path]


def read_text(path: Path) -> str:
    """The text of a file."""
    text = "".join(read_blocks(path))
    if not text.strip():
        raise ValueError(f"{path} is empty; give a text")
    return text


def _print_tables(records: list[Record]) -> None:
    from ..analysis.table import retention_table, words_table

    for table in (retention_table(records), words_table(records)):
        if table is not None and table.rows:
            print(table.markdown())
