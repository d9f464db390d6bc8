"""One HTML page that needs nothing but itself: tables, figures, conditions, and the commands that make each again."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from ..eval.record import Record
from .figures import RECORD_FIGURES, TRACE_FIGURES, draw, draw_trace
from .records import models
from .results import Results, load_trace
from .style import conditions
from .table import MAKERS, Table, other_tables, topic_tables

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto;
       padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.25rem; margin-top: 2.6rem; }
h3 { font-size: 1rem; margin-bottom: .3rem; }
p.under { color: #555; margin-top: 0; } nav a { margin-right: 1rem; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; } figcaption { color: #444; font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
tbody th, thead th:first-child { text-align: left; font-weight: 600; }
td small, th small { display: block; color: #666; font-size: .75em; } td.best { font-weight: 700; background: #eef4fb; }
tr.paper th, tr.paper td { color: #666; font-weight: 400; font-style: italic; }
pre { background: #f5f5f5; padding: .6rem .8rem; overflow-x: auto; font-size: .85rem; }
details { margin: .4rem 0; } summary { cursor: pointer; color: #444; }
ul.notes { color: #444; font-size: .9rem; padding-left: 1.2rem; }
@media print { details { display: block; } }
"""
_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}


def report(results: Results, *, title: str = "msrnn: results") -> str:
    """The page, as text."""
    if not results.records and not results.traces:
        raise ValueError("the results hold no records and no traces, so there is nothing to report")
    sections = [*_record_sections(results), *_trace_sections(results)]
    nav = " ".join(f'<a href="#{name}">{escape(said)}</a>' for name, said, _ in sections)
    shown = (f'<section id="{name}"><h2>{escape(head)}</h2>\n{text}</section>' for name, head, text in sections)
    body, again = "\n".join(shown), f"msrnn report {' '.join(results.given)} -o report.html"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n<p class=under>{escape(_under(results.records))}</p>\n<nav>{nav}</nav>\n"
        f"{body}\n<section id=again><h2>Made again</h2><p>This page:</p>"
        f"<pre>{escape(again)}</pre></section>\n</body></html>\n"
    )


def _under(records: Sequence[Record]) -> str:
    if not records:
        return "from traces"
    newest = max(one.date for one in records)[:10]
    return f"{', '.join(models(records))} · {len(records):,} records, the newest of {newest}"


Section = tuple[str, str, str]  # the anchor, the heading, what is in it


def _record_sections(results: Results) -> Iterator[Section]:
    """A section for each model: every figure with the tables that belong to it."""
    for number, model in enumerate(models(results.records)):
        mine = [one for one in results.records if one.model == model]
        yield f"model{number}", model, "\n".join(_topics(mine, results.given))


def _topics(records: Sequence[Record], given: Sequence[str]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        drawn = {name: path for name, _, path in draw(records, Path(folder), kind="svg")}
        for topic in [*RECORD_FIGURES, *(name for name in MAKERS if name not in RECORD_FIGURES)]:
            if topic in drawn:
                yield _figure(topic, drawn[topic], records, given)
            yield from (_table(table) for table in topic_tables(topic, records))
    yield from (_table(table) for table in other_tables(records))


def _figure(name: str, path: Path, records: Sequence[Record], given: Sequence[str]) -> str:
    figure = RECORD_FIGURES[name]
    used = [one for one in records if figure.wants(one)]
    plot = f"msrnn plot {' '.join(given)} -o figures --figure {name}"
    return f"{_picture(path, figure.shows)}{_origin(used, plot)}"


def _table(table: Table) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return f"<h3>{escape(table.title)}</h3>{table.html()}<ul class=notes>{notes}</ul>{_origin(table.records)}"


def _origin(records: Sequence[Record], *more: str) -> str:
    """Conditions, and the commands that measured these records and drew this."""
    commands = [*dict.fromkeys(one.command for one in records if one.command), *more]
    return _folded("".join(f"<li>{escape(line)}</li>" for line in _facts(records)), commands)


def _facts(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    yield conditions(records)
    yield f"measured from {min(one.date for one in records)} to {max(one.date for one in records)}"
    yield "commit " + ", ".join(sorted({one.commit for one in records}))
    for line in sorted({", ".join(f"{k} {v}" for k, v in sorted(one.versions.items())) for one in records}):
        yield line
    yield "seed " + ", ".join(str(seed) for seed in sorted({one.seed for one in records}))
    for line in sorted(
        {", ".join(f"{k} = {_brief(v)}" for k, v in one.settings.items()) for one in records if one.settings}
    ):
        yield f"settings: {line}"


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _trace_sections(results: Results) -> Iterator[Section]:
    for number, path in enumerate(results.traces):
        trace = load_trace(path)
        with tempfile.TemporaryDirectory() as folder:
            shown = [
                _picture(file, TRACE_FIGURES[name][1]) for name, file in draw_trace(trace, path.stem, Path(folder))
            ]
        facts = {"policy": trace.policy, "model": trace.model, "tokens": f"{trace.length:,}"} | trace.notes
        about = "".join(f"<li>{escape(name)}: {escape(_brief(value))}</li>" for name, value in facts.items())
        yield f"trace{number}", f"trace {path.stem}", "".join(shown) + _folded(about, [f"msrnn plot {path} -o figures"])


def _folded(facts: str, commands: Sequence[str]) -> str:
    """Conditions and commands, out of the way until they are wanted."""
    shown = f"<pre>{escape(chr(10).join(commands))}</pre>" if commands else ""
    return f"<details><summary>conditions and commands</summary><ul class=notes>{facts}</ul>{shown}</details>"


def _picture(path: Path, shows: str) -> str:
    """The file itself inside the page; as a picture, so that names within two SVGs cannot meet."""
    data = f"data:{_KINDS[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
    said = escape(shows[:1].upper() + shows[1:])
    return f'<figure><img alt="{said}" src="{data}"><figcaption>{said}</figcaption></figure>'
