"""Records as tables, with the paper's own numbers beside ours where it has them. Nothing is measured or drawn here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from ..eval.record import Record
from . import paper
from .compare import perplexity_gap
from .kept import MEANING, ranked_classes
from .records import brief, chosen, families
from .style import conditions


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table; `hint` says more, e.g. an interval."""

    text: str
    hint: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """`rows` begin with their name. `notes` say how to read it, `records` what it was made from."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def markdown(self) -> str:
        head = "| " + " | ".join(self.columns) + " |"
        lines = ["| " + " | ".join(_marked(cell) for cell in row) + " |" for row in self.rows]
        said = [f"\n{note}" for note in (conditions(self.records), *self.notes) if note]
        return "\n".join([f"**{self.title}**\n", head, "|" + "---|" * len(self.columns), *lines, *said]) + "\n"

    def html(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join(_html_row(row) for row in self.rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _marked(cell: Cell) -> str:
    text = cell.text.replace("|", "\\|")
    return (f"**{text}**" if cell.best else text) + (f" ({cell.hint})" if cell.hint else "")


def _html_row(row: Sequence[Cell]) -> str:
    kind = " class=paper" if row[0].text.endswith(", paper") else ""
    return f"<tr{kind}>{''.join(_html(cell, first=index == 0) for index, cell in enumerate(row))}</tr>"


def _html(cell: Cell, *, first: bool) -> str:
    tag = "th" if first else "td"
    hint = f"<small>{escape(cell.hint)}</small>" if cell.hint else ""
    return f"<{tag}{' class=best' if cell.best else ''}>{escape(cell.text)}{hint}</{tag}>"


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """Every table that the records have something for."""
    for topic in MAKERS:
        yield from topic_tables(topic, records)
    yield from other_tables(records)


def topic_tables(topic: str, records: Sequence[Record]) -> Iterator[Table]:
    """Those that stand under one figure."""
    for make in MAKERS.get(topic, ()):
        made = make(records)
        if made is not None and made.rows:
            yield made


def perplexity_table(records: Sequence[Record]) -> Table | None:
    """The paper's table 3: a line for each policy, a column for each capacity."""
    mine = [one for one in chosen(records, "pg19", "perplexity") if not one.cell]
    full = next((one for one in mine if one.policy == "full"), None)
    sizes = _sizes(mine)
    best = {size: min(one.value for one in mine if one.capacity == size) for size in sizes}
    rows = []
    for name, found in families(mine).items():
        by_size = {one.capacity: one for one in found}
        cells = [_value(by_size.get(None if name == "full" else size), best.get(size)) for size in sizes]
        rows.append([Cell(name), *cells])
        rows += _paper_row(name, sizes)
    notes = ["With each: its 95 % interval, from resampling texts. Bold: the best of a column."]
    if full is not None and full.groups > 1:
        notes.append("Texts differ more than policies do: compare policies in the next table, text by text.")
    return Table("PG-19 perplexity by capacity", ["policy", *_size_names(sizes)], rows, [*notes, _beside()], mine)


def excess_table(records: Sequence[Record]) -> Table | None:
    """By how much each policy's perplexity exceeds full's, compared text by text."""
    mine = [one for one in chosen(records, "pg19", "perplexity") if not one.cell]
    full = next((one for one in mine if one.policy == "full"), None)
    if full is None:
        return None
    sizes, rows = _sizes(mine), []
    for name, found in families(mine).items():
        by_size = {one.capacity: one for one in found}
        if name != "full":
            rows.append([Cell(name), *[_excess_cell(by_size.get(size), full) for size in sizes]])
            rows += _paper_excess_row(name, sizes)
    notes = ["With each: the 95 % interval of the difference, from resampling texts for both at once."]
    title = "PG-19 perplexity above full, in per cent"
    return Table(title, ["policy", *_size_names(sizes)], rows, [*notes, _beside()], mine)


def _excess_cell(record: Record | None, full: Record) -> Cell:
    found = perplexity_gap(record, full) if record else None
    if found is None:
        return Cell("")
    span = "" if found.low is None or found.high is None else f"{100 * found.low:.3g} to {100 * found.high:.3g}"
    return Cell(_short(100 * found.value), span)


def _paper_row(name: str, sizes: Sequence[float]) -> list[list[Cell]]:
    values = [paper.perplexity(name, size) for size in sizes]
    if not any(values):
        return []
    return [[Cell(f"{name}, paper"), *[Cell("" if value is None else _short(value)) for value in values]]]


def _paper_excess_row(name: str, sizes: Sequence[float]) -> list[list[Cell]]:
    values, full = [paper.perplexity(name, size) for size in sizes], paper.PERPLEXITY["full"][0]
    if not any(values):
        return []
    shown = [Cell("" if value is None else _short(100 * (value / full - 1))) for value in values]
    return [[Cell(f"{name}, paper"), *shown]]


def score_table(records: Sequence[Record]) -> Table | None:
    """SQuALITY and QASPER by capacity."""
    mine = [one for task, metric in (("squality", "rouge"), ("qasper", "f1")) for one in chosen(records, task, metric)]
    sizes, rows = _sizes(mine), []
    for task in dict.fromkeys(one.task for one in mine):
        own = [one for one in mine if one.task == task and not one.cell]
        for name, found in families(own).items():
            by_size = {one.capacity: one for one in found}
            cells = [_value(by_size.get(None if name == "full" else size), None) for size in sizes]
            rows.append([Cell(f"{task}: {name}"), *cells])
    notes = [f"The paper, {task}: {said}." for task, said in paper.UNDERSTANDING.items()]
    return Table("Long-range understanding by capacity", ["task and policy", *_size_names(sizes)], rows, notes, mine)


def running_table(records: Sequence[Record]) -> Table | None:
    """Perplexity so far at some positions."""
    mine = chosen(records, "extrapolation", "running perplexity")
    places = sorted({float(one.cell["position"]) for one in mine})
    wanted = (
        [min(places, key=lambda place: abs(place - goal)) for goal in (2e3, 4e3, 8e3, 16e3, 32e3, 48e3, 7e4)]
        if places
        else []
    )
    columns = sorted(set(wanted))
    lines: dict[tuple[str, str], dict[float, Record]] = {}
    for one in mine:
        key = (one.policy, str(one.cell.get("positions", "plain")))
        lines.setdefault(key, {})[float(one.cell["position"])] = one
    rows = [
        [Cell(f"{brief(policy)}, {positions} positions"), *[_value(line.get(place), None) for place in columns]]
        for (policy, positions), line in lines.items()
    ]
    notes = [f"The paper: {paper.EXTRAPOLATION}."]
    names = [f"{place:,.0f}" for place in columns]
    return Table("Running perplexity by position", ["policy", *names], rows, notes, mine)


def retention_table(records: Sequence[Record]) -> Table | None:
    """Which tokens stay, in one line for each policy."""
    metrics = {
        "recent share": "recent", "first token held": "first token held", "tokens 2 to 25 held": "2 to 25 held",
        "any token held": "any token held", "agreement of layers": "layers agree",
        "agreement of layers on older tokens": "on older tokens", "agreement by chance on older tokens": "by chance",
        "agreement of heads": "heads agree", "states' worth of distinct tokens": "distinct tokens, in states",
        "perplexity": "perplexity",
    }  # fmt: skip
    mine = [one for one in chosen(records, "retention") if not one.cell and one.metric in metrics]
    shown = [name for name in metrics if any(one.metric == name for one in mine)]
    rows = []
    for policy in dict.fromkeys(one.policy for one in mine):
        own = {one.metric: one for one in mine if one.policy == policy}
        cells = [_value(own.get(name), None, share=name != "perplexity") for name in shown]
        rows.append([Cell(brief(policy)), *cells])
    low, high = paper.RECENT_SHARE
    notes = [
        f"The paper: {low:.0%} to {high:.0%} of what TOVA keeps is recent; the first token stays to the end at every "
        "size, tokens 2 to 25 leave much sooner.",
        "Recent: what a window of the same size would hold, too. Agreement: held by both, of what either holds.",
    ]
    return Table("Which tokens stay", ["policy", *[metrics[name] for name in shown]], rows, notes, mine)


def words_table(records: Sequence[Record]) -> Table | None:
    """Mean steps kept by word class, the longest kept first."""
    mine = [one for one in chosen(records, "retention", "steps kept") if "class" in one.cell]
    whole = [one for one in chosen(records, "retention", "steps kept") if not one.cell]
    policies = list(dict.fromkeys(one.policy for one in mine))
    rows = [[Cell("all"), *_word_cells("all", policies, {one.policy: one for one in whole}, mine)]] if mine else []
    for name in ranked_classes(mine):
        own = {one.policy: one for one in mine if one.cell["class"] == name}
        said = f"{name} ({MEANING[name]})" if name in MEANING else name
        rows.append([Cell(said), *_word_cells(name, policies, own, mine)])
    columns = [
        column
        for policy in policies
        for column in [brief(policy), *([f"{brief(policy)}, paper"] if _has_paper(policy, mine) else [])]
    ]
    notes = [
        "Steps at which a token was visible, its own included, counted to the end for those still held.",
        _beside(),
    ]
    return Table("Mean steps kept by word class", ["class", *columns], rows, notes, mine)


def _has_paper(policy: str, found: Sequence[Record]) -> bool:
    return any(paper.steps_kept("all", one) is not None for one in found if one.policy == policy)


def _word_cells(name: str, policies: Sequence[str], own: dict[str, Record], mine: Sequence[Record]) -> Iterator[Cell]:
    for policy in policies:
        record = own.get(policy)
        yield _value(record, None, digits=0)
        if _has_paper(policy, mine):
            theirs = paper.steps_kept(name, record)
            yield Cell("" if theirs is None else str(theirs))


def recall_table(records: Sequence[Record]) -> Table | None:
    """Needle and passkey by length, over all depths, and facts by turns."""
    mine = chosen(records, ("needle", "turns"), "recall")
    columns: dict[str, Callable[[Record], bool]] = {}
    for one in sorted(mine, key=lambda one: (one.task, str(one.cell.get("kind")), _place(one))):
        kind, place = one.cell.get("kind", one.task), _place(one)
        columns[f"{kind} {place:,.0f}"] = lambda other, k=kind, p=place: (
            (other.cell.get("kind", other.task), _place(other)) == (k, p)
        )  # type: ignore[misc]
    rows = []
    for policy in dict.fromkeys(one.policy for one in mine):
        own = [[one for one in mine if one.policy == policy and fits(one)] for fits in columns.values()]
        rows.append([Cell(brief(policy)), *[Cell(f"{_mean(found):.2f}" if found else "") for found in own]])
    notes = [
        "Needle and passkey by the length of the text, mean over depths; turns by the turns since the fact was told."
    ]
    return Table("Recall", ["policy", *columns], rows, notes, mine)


def _place(record: Record) -> float:
    return float(record.cell.get("length", record.cell.get("turns", 0)))


def _mean(found: Sequence[Record]) -> float:
    return sum(one.value for one in found) / len(found)


def story_table(records: Sequence[Record]) -> Table | None:
    mine = [one for one in chosen(records, "story") if not one.cell]
    metrics = list(dict.fromkeys(one.metric for one in mine))
    rows = []
    for policy in dict.fromkeys(one.policy for one in mine):
        own = {one.metric: one for one in mine if one.policy == policy}
        rows.append([Cell(brief(policy)), *[_value(own.get(name), None) for name in metrics]])
    said = "; ".join(f"{size}: {win}/{tie}/{lost} %" for size, (win, tie, lost) in paper.STORIES.items())
    return Table("Story generation", ["policy", *metrics], rows, [f"The paper, TOVA wins/tie/full wins: {said}."], mine)


def speed_table(records: Sequence[Record]) -> Table | None:
    """Everything that was timed, with what the check of the kernels said before it."""
    mine = [one for one in records if one.metric.endswith("tokens/s")]
    rows = []
    for one in mine:
        told = {name: value for name, value in one.settings.items() if name in ("batch", "chunk", "lanes", "compiled")}
        where = ", ".join(f"{name} {value}" for name, value in (one.cell | told).items())
        facts = [one.policy, one.metric.removesuffix(" tokens/s"), where]
        gate = str(one.settings.get("gate", "")).split(":")[0]
        rows.append([*map(Cell, facts), _value(one, None), Cell(gate), Cell(one.machine)])
    said = ", ".join(f"{size}: {gain:g}" for size, gain in zip(paper.SPEED_SIZES, paper.THROUGHPUT, strict=True))
    notes = [f"The paper, one V100, relative to 4,096 at the largest batch of each size: {said}."]
    notes += sorted({f"Note on a row: {one.settings['note']}." for one in mine if "note" in one.settings})
    return Table("Speed", ["policy", "what", "where", "tokens/s", "kernels checked", "machine"], rows, notes, mine)


def other_tables(records: Sequence[Record]) -> Iterator[Table]:
    """Whatever no other table shows, as it is: the answers to open questions, for one."""
    known = ("pg19", "squality", "qasper", "extrapolation", "needle", "turns", "story", "retention", "benchmark")
    for task in dict.fromkeys(one.task for one in records if one.task not in known):
        mine = [one for one in records if one.task == task]
        names = list(dict.fromkeys(name for one in mine for name in one.cell))
        rows = [
            [
                Cell(one.policy),
                *[Cell(str(one.cell.get(name, ""))) for name in names],
                Cell(one.metric),
                _value(one, None),
            ]
            for one in mine
        ]
        yield Table(task[:1].upper() + task[1:], ["policy", *names, "metric", "value"], rows, [], mine)


# by the figure they stand under
MAKERS: dict[str, tuple[Callable[[Sequence[Record]], Table | None], ...]] = {
    "perplexity": (perplexity_table, excess_table),
    "score": (score_table,),
    "running": (running_table,),
    "retention": (retention_table,),
    "words": (words_table,),
    "throughput": (speed_table,),
    "turns": (recall_table,),
    "story": (story_table,),
}


def _sizes(found: Sequence[Record]) -> list[float]:
    return sorted({one.capacity for one in found if one.capacity})


def _size_names(sizes: Sequence[float]) -> list[str]:
    return [f"{size:,g}" for size in sizes]


def _value(record: Record | None, best: float | None, *, share: bool = False, digits: int | None = None) -> Cell:
    if record is None:
        return Cell("")
    text = (
        f"{record.value:.{digits}f}" if digits is not None else f"{record.value:.2f}" if share else _short(record.value)
    )
    if record.low is None or record.high is None:
        return Cell(text, best=record.value == best)
    low, high = (_short(edge) if digits is None else f"{edge:.{digits}f}" for edge in (record.low, record.high))
    return Cell(text, f"{low} to {high}", best=record.value == best)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def _beside() -> str:
    return f"Lines and columns marked paper: {paper.MODEL}, as printed; another model, so shapes compare, not values."
