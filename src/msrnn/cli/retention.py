"""`msrnn retention`: which tokens stay, measured on texts and written as records."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ..system.text import read_blocks
from . import options
from .session import device_of, hush, note

if TYPE_CHECKING:
    from ..eval.perplexity import Progress

_ABOUT = """\
Read texts under one or several policies and write records of what stayed: the share of recent tokens, the first token
and tokens 2 to 25, survival by age, mean steps kept by word class (Penn tags), agreement of layers and of heads.
Policies of one capacity are compared with the first of them. msrnn plot and msrnn report show the records.
"""
_MORE = """\
examples:
  msrnn retention book.txt --policy tova:256 -o results/retention.jsonl
  msrnn retention books/ --policy tova:256 --policy tova-head:256 --traces traces -o results/retention.jsonl
  msrnn plot results/retention.jsonl traces -o figures
"""


def add(commands: options.Commands[options.Parser]) -> None:
    parser = commands.add_parser("retention", help="which kinds of tokens stay", description=_ABOUT, epilog=_MORE)
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="UTF-8 text files, or folders of *.txt")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="records are added to this file")
    parser.add_argument("--policy", action="append", metavar="POLICY", help="may be given again (default: tova:256)")
    parser.add_argument(
        "--tokens", type=options.whole(2), default=4096, metavar="N", help="read so many of each (default: 4096)"
    )
    parser.add_argument("--traces", metavar="DIR", help="keep a trace of every reading here, and use those it has")
    parser.add_argument("--no-words", action="store_true", help="leave word classes out; the tagger is not needed")
    options.add_model(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="no notes and no progress on standard error")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    from ..policy import parse, split_profile

    wanted = arguments.policy or ["tova:256"]
    policies = list(dict.fromkeys(text if split_profile(text)[1] else str(parse(text)) for text in wanted))
    texts = dict(read_text(path) for given in arguments.texts for path in text_files(given))
    _check_output(Path(arguments.output))
    import torch

    from ..analysis.measure import measure
    from ..eval.record import write_records
    from ..hf.load import load

    hush()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    where = {"device": device_of(arguments.device), "dtype": arguments.dtype, "revision": arguments.revision}
    model, tokenizer = load(arguments.model, **where, trust_remote_code=arguments.trust_remote_code)
    bars = Bars(arguments.tokens, arguments.quiet)
    options_ = {"length": arguments.tokens, "words": not arguments.no_words, "traces": arguments.traces}
    records = measure(model, tokenizer, texts, policies, progress=bars, **options_)
    new = write_records(arguments.output, records)
    _show(records)
    if not arguments.quiet:
        note(f"{len(new)} records in {arguments.output}; see them with msrnn plot {arguments.output} -o figures")


class Bars:
    """A progress bar for each reading, the one before it gone."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total, self.quiet = total, quiet

    def __call__(self, name: str) -> Progress | None:
        from tqdm import tqdm

        seen = sys.stderr.isatty()
        pace = {"mininterval": 0.2 if seen else 10, "delay": 0.5 if seen else 10}
        bar = tqdm(total=self.total, desc=name, unit="tok", leave=False, disable=self.quiet, **pace)

        def update(count: int) -> None:
            bar.update(count)
            if bar.n >= bar.total:
                bar.close()

        return update


def text_files(given: str) -> list[Path]:
    path = Path(given)
    if path.is_dir():
        found = sorted(path.glob("*.txt"))
        if not found:
            raise ValueError(f"{given} has no *.txt; give text files, or a folder that has some")
        return found
    if not path.exists():
        raise ValueError(f"there is no file {given}; give text files, or folders of *.txt")
    return [path]


def read_text(path: Path) -> tuple[str, str]:
    """A text's name and the text."""
    text = "".join(read_blocks(path))
    if not text.strip():
        raise ValueError(f"{path} is empty; give a text")
    return path.stem, text


def _check_output(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no folder {path.parent}; make it first")


def _show(records: list) -> None:  # type: ignore[type-arg]
    from ..analysis.table import retention_table, words_table

    for table in (retention_table(records), words_table(records)):
        if table is not None and table.rows:
            print(table.markdown())
