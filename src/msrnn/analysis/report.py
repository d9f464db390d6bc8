"""One self-contained HTML page: tables, figures, conditions, and the commands that reproduce each.

The page is `report.html.j2`; this file gathers what goes into it.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader

from ..eval.record import Record
from .figures import RECORD_FIGURES, TRACE_FIGURES, draw, draw_trace
from .records import models
from .results import Results, load_trace
from .style import conditions
from .table import TABLES_BY_FIGURE, Table, other_tables, topic_tables

_TEMPLATE = "report.html.j2"
_MIME = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True)
class Part:
    """A figure (`source` is a data URL) or a table, with its conditions and commands."""

    source: str = ""
    caption: str = ""
    table: Table | None = None
    conditions: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    anchor: str
    heading: str
    parts: list[Part]


def report(results: Results, *, title: str = "msrnn: results") -> str:
    """The page, as text."""
    if not results.records and not results.traces:
        raise ValueError("the results hold no records and no traces, so there is nothing to report")
    sections = [*_record_sections(results), *_trace_sections(results)]
    command = f"msrnn report {' '.join(results.paths)} -o report.html"
    return _render(title=title, summary=_summary(results.records), sections=sections, command=command)


def _render(**values: object) -> str:
    environment = Environment(loader=PackageLoader("msrnn.analysis", ""), autoescape=True, keep_trailing_newline=True)
    return environment.get_template(_TEMPLATE).render(values)


def _summary(records: Sequence[Record]) -> str:
    if not records:
        return "from traces"
    newest = max(one.date for one in records)[:10]
    return f"{', '.join(models(records))} · {len(records):,} records, the newest of {newest}"


def _record_sections(results: Results) -> Iterator[Section]:
    """A section for each model: every figure with the tables that belong to it."""
    for number, model in enumerate(models(results.records)):
        records = [one for one in results.records if one.model == model]
        yield Section(f"model{number}", model, list(_record_parts(records, results.paths)))


def _record_parts(records: Sequence[Record], paths: Sequence[str]) -> Iterator[Part]:
    with tempfile.TemporaryDirectory() as folder:
        files = {name: path for name, _, path in draw(records, Path(folder), kind="svg")}
        for topic in [*RECORD_FIGURES, *(name for name in TABLES_BY_FIGURE if name not in RECORD_FIGURES)]:
            if topic in files:
                yield _figure(topic, files[topic], records, paths)
            yield from (_table(table) for table in topic_tables(topic, records))
    yield from (_table(table) for table in other_tables(records))


def _figure(name: str, path: Path, records: Sequence[Record], paths: Sequence[str]) -> Part:
    figure = RECORD_FIGURES[name]
    sources = [one for one in records if figure.uses(one)]
    plot = f"msrnn plot {' '.join(paths)} -o figures --figure {name}"
    return Part(
        _data_url(path), _caption(figure.description), None, list(_conditions(sources)), [*_commands(sources), plot]
    )


def _table(table: Table) -> Part:
    lines, commands = list(_conditions(table.records)), _commands(table.records)
    return Part(table=table, conditions=lines, commands=commands)


def _commands(records: Sequence[Record]) -> list[str]:
    """The commands that measured these records, each once."""
    return list(dict.fromkeys(one.command for one in records if one.command))


def _conditions(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    yield conditions(records)
    yield f"measured from {min(one.date for one in records)} to {max(one.date for one in records)}"
    yield "commit " + ", ".join(sorted({one.commit for one in records}))
    yield from sorted({", ".join(f"{k} {v}" for k, v in sorted(one.versions.items())) for one in records})
    yield "seed " + ", ".join(str(seed) for seed in sorted({one.seed for one in records}))
    settings = {", ".join(f"{k} = {_shorten(v)}" for k, v in one.settings.items()) for one in records if one.settings}
    yield from (f"settings: {line}" for line in sorted(settings))


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _trace_sections(results: Results) -> Iterator[Section]:
    for number, path in enumerate(results.traces):
        trace = load_trace(path)
        facts = {"policy": trace.policy, "model": trace.model, "tokens": f"{trace.length:,}"} | trace.notes
        lines = [f"{name}: {_shorten(value)}" for name, value in facts.items()]
        with tempfile.TemporaryDirectory() as folder:
            figures = [
                Part(_data_url(file), _caption(TRACE_FIGURES[name][1]))
                for name, file in draw_trace(trace, path.stem, Path(folder))
            ]
        commands = Part(conditions=lines, commands=[f"msrnn plot {path} -o figures"])
        yield Section(f"trace{number}", f"trace {path.stem}", [*figures, commands])


def _caption(description: str) -> str:
    return description[:1].upper() + description[1:]


def _data_url(path: Path) -> str:
    """The file inside the page; as an image, so that ids within two SVGs cannot clash."""
    return f"data:{_MIME[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
