"""Tables of records, with the paper's numbers beside ours where it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..eval.record import Record
from . import paper
from .compare import perplexity_gap
from .policy_names import short_name
from .records import families, select
from .retention_figures import MEANING, ranked_classes
from .style import conditions


@dataclass(frozen=True)
class Cell:
    """One cell of a table; `hint` is a detail, e.g. an interval."""

    text: str
    hint: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """`rows` begin with their name. `notes` explain the table; `records` are its sources."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def markdown(self) -> str:
        header = "| " + " | ".join(self.columns) + " |"
        lines = ["| " + " | ".join(_markdown(cell) for cell in row) + " |" for row in self.rows]
        notes = [f"\n{note}" for note in (conditions(self.records), *self.notes) if note]
        return "\n".join([f"**{self.title}**\n", header, "|" + "---|" * len(self.columns), *lines, *notes]) + "\n"


def _markdown(cell: Cell) -> str:
    text = cell.text.replace("|", "\\|")
    return (f"**{text}**" if cell.best else text) + (f" ({cell.hint})" if cell.hint else "")


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """Every table that has data in the records."""
    for topic in TABLES_BY_FIGURE:
        yield from topic_tables(topic, records)
    yield from other_tables(records)


def topic_tables(topic: str, records: Sequence[Record]) -> Iterator[Table]:
    """The tables under one figure."""
    for make in TABLES_BY_FIGURE.get(topic, ()):
        table = make(records)
        if table is not None and table.rows:
            yield table


def perplexity_table(records: Sequence[Record]) -> Table | None:
    """The paper's table 3: a line for each policy, a column for each capacity."""
    subset = [one for one in select(records, "pg19", "perplexity") if not one.cell]
    full = next((one for one in subset if one.policy == "full"), None)
    sizes = _sizes(subset)
    best = {size: min(one.value for one in subset if one.capacity == size) for size in sizes}
    rows = []
    for name, line in families(subset).items():
        by_size = {one.capacity: one for one in line}
        cells = [_value(by_size.get(None if name == "full" else size), best.get(size)) for size in sizes]
        rows.append([Cell(name), *cells])
        rows += _paper_row(name, sizes)
    notes = ["With each: its 95 % interval, from resampling texts. Bold: the best of a column."]
    if full is not None and full.groups > 1:
        notes.append("Texts differ more than policies do: the next table compares policies text by text.")
    return Table("PG-19 perplexity by capacity", ["policy", *_size_names(sizes)], rows, [*notes, _paper_note()], subset)


def gap_table(records: Sequence[Record]) -> Table | None:
    """The gap of each policy's perplexity to full's, compared text by text."""
    subset = [one for one in select(records, "pg19", "perplexity") if not one.cell]
    full = next((one for one in subset if one.policy == "full"), None)
    if full is None:
        return None
    sizes, rows = _sizes(subset), []
    for name, line in families(subset).items():
        by_size = {one.capacity: one for one in line}
        if name != "full":
            rows.append([Cell(name), *[_gap_cell(by_size.get(size), full) for size in sizes]])
            rows += _paper_gap_row(name, sizes)
    notes = ["With each: the 95 % interval of the difference, from resampling texts for both at once."]
    title = "PG-19 perplexity above full, in per cent"
    return Table(title, ["policy", *_size_names(sizes)], rows, [*notes, _paper_note()], subset)


def _gap_cell(record: Record | None, full: Record) -> Cell:
    gap = perplexity_gap(record, full) if record else None
    if gap is None:
        return Cell("")
    span = "" if gap.low is None or gap.high is None else f"{100 * gap.low:.3g} to {100 * gap.high:.3g}"
    return Cell(_short(100 * gap.value), span)


def _paper_row(name: str, sizes: Sequence[float]) -> list[list[Cell]]:
    values = [paper.perplexity(name, size) for size in sizes]
    if not any(values):
        return []
    return [[Cell(f"{name}, paper"), *[Cell("" if value is None else _short(value)) for value in values]]]


def _paper_gap_row(name: str, sizes: Sequence[float]) -> list[list[Cell]]:
    values, full = [paper.perplexity(name, size) for size in sizes], paper.PERPLEXITY["full"][0]
    if not any(values):
        return []
    cells = [Cell("" if value is None else _short(100 * (value / full - 1))) for value in values]
    return [[Cell(f"{name}, paper"), *cells]]


def score_table(records: Sequence[Record]) -> Table | None:
    """SQuALITY and QASPER by capacity."""
    subset = [
        one for task, metric in (("squality", "rouge"), ("qasper", "f1")) for one in select(records, task, metric)
    ]
    sizes, rows = _sizes(subset), []
    for task in dict.fromkeys(one.task for one in subset):
        own = [one for one in subset if one.task == task and not one.cell]
        for name, line in families(own).items():
            by_size = {one.capacity: one for one in line}
            cells = [_value(by_size.get(None if name == "full" else size), None) for size in sizes]
            rows.append([Cell(f"{task}: {name}"), *cells])
    notes = [f"The paper, {task}: {note}." for task, note in paper.UNDERSTANDING.items()]
    return Table("Long-range understanding by capacity", ["task and policy", *_size_names(sizes)], rows, notes, subset)


def running_table(records: Sequence[Record]) -> Table | None:
    """Perplexity so far at some positions."""
    subset = select(records, "extrapolation", "running perplexity")
    places = sorted({float(one.cell["position"]) for one in subset})
    nearest = (
        [min(places, key=lambda place: abs(place - goal)) for goal in (2e3, 4e3, 8e3, 16e3, 32e3, 48e3, 7e4)]
        if places
        else []
    )
    columns = sorted(set(nearest))
    lines: dict[tuple[str, str], dict[float, Record]] = {}
    for one in subset:
        key = (one.policy, str(one.cell.get("positions", "plain")))
        lines.setdefault(key, {})[float(one.cell["position"])] = one
    rows = [
        [Cell(f"{short_name(policy)}, {positions} positions"), *[_value(line.get(place), None) for place in columns]]
        for (policy, positions), line in lines.items()
    ]
    notes = [f"The paper: {paper.EXTRAPOLATION}."]
    names = [f"{place:,.0f}" for place in columns]
    return Table("Running perplexity by position", ["policy", *names], rows, notes, subset)


def retention_table(records: Sequence[Record]) -> Table | None:
    """Which tokens stay: one line per policy."""
    metrics = {
        "recent share": "recent", "first token held": "first token held", "tokens 2 to 25 held": "2 to 25 held",
        "any token held": "any token held", "agreement of layers": "layers agree",
        "agreement of layers on older tokens": "on older tokens", "agreement by chance on older tokens": "by chance",
        "agreement of heads": "heads agree", "states' worth of distinct tokens": "distinct tokens, in states",
        "perplexity": "perplexity",
    }  # fmt: skip
    subset = [one for one in select(records, "retention") if not one.cell and one.metric in metrics]
    names = [name for name in metrics if any(one.metric == name for one in subset)]
    rows = []
    for policy in dict.fromkeys(one.policy for one in subset):
        own = {one.metric: one for one in subset if one.policy == policy}
        cells = [_value(own.get(name), None, share=name != "perplexity") for name in names]
        rows.append([Cell(short_name(policy)), *cells])
    low, high = paper.RECENT_SHARE
    notes = [
        f"The paper: {low:.0%} to {high:.0%} of what TOVA keeps is recent; the first token stays to the end at every "
        "size, tokens 2 to 25 leave much sooner.",
        "Recent: what a window of the same size would hold, too. Agreement: held by both, of what either holds.",
    ]
    return Table("Which tokens stay", ["policy", *[metrics[name] for name in names]], rows, notes, subset)


def words_table(records: Sequence[Record]) -> Table | None:
    """Mean steps kept by word class, longest first."""
    subset = [one for one in select(records, "retention", "steps kept") if "class" in one.cell]
    whole = [one for one in select(records, "retention", "steps kept") if not one.cell]
    policies = list(dict.fromkeys(one.policy for one in subset))
    rows = [[Cell("all"), *_word_cells("all", policies, {one.policy: one for one in whole}, subset)]] if subset else []
    for name in ranked_classes(subset):
        own = {one.policy: one for one in subset if one.cell["class"] == name}
        title = f"{name} ({MEANING[name]})" if name in MEANING else name
        rows.append([Cell(title), *_word_cells(name, policies, own, subset)])
    columns = [
        column
        for policy in policies
        for column in [short_name(policy), *([f"{short_name(policy)}, paper"] if _has_paper(policy, subset) else [])]
    ]
    notes = [
        "Steps at which a token was visible, its own included, counted to the end for those still held.",
        _paper_note(),
    ]
    return Table("Mean steps kept by word class", ["class", *columns], rows, notes, subset)


def _has_paper(policy: str, line: Sequence[Record]) -> bool:
    return any(paper.steps_kept("all", one) is not None for one in line if one.policy == policy)


def _word_cells(name: str, policies: Sequence[str], own: dict[str, Record], subset: Sequence[Record]) -> Iterator[Cell]:
    for policy in policies:
        record = own.get(policy)
        yield _value(record, None, digits=0)
        if _has_paper(policy, subset):
            theirs = paper.steps_kept(name, record)
            yield Cell("" if theirs is None else str(theirs))


def recall_table(records: Sequence[Record]) -> Table | None:
    """Needle and passkey by length, over all depths, and facts by turns."""
    subset = select(records, ("needle", "turns"), "recall")
    columns: dict[str, Callable[[Record], bool]] = {}
    for one in sorted(subset, key=lambda one: (one.task, str(one.cell.get("kind")), _place(one))):
        kind, place = one.cell.get("kind", one.task), _place(one)
        columns[f"{kind} {place:,.0f}"] = lambda other, k=kind, p=place: (
            (other.cell.get("kind", other.task), _place(other)) == (k, p)
        )  # type: ignore[misc]
    rows = []
    for policy in dict.fromkeys(one.policy for one in subset):
        own = [[one for one in subset if one.policy == policy and fits(one)] for fits in columns.values()]
        rows.append([Cell(short_name(policy)), *[Cell(f"{_mean(line):.2f}" if line else "") for line in own]])
    notes = [
        "Needle and passkey by the length of the text, mean over depths; turns by the turns since the fact was stated."
    ]
    return Table("Recall", ["policy", *columns], rows, notes, subset)


def _place(record: Record) -> float:
    return float(record.cell.get("length", record.cell.get("turns", 0)))


def _mean(line: Sequence[Record]) -> float:
    return sum(one.value for one in line) / len(line)


def story_table(records: Sequence[Record]) -> Table | None:
    subset = [one for one in select(records, "story") if not one.cell]
    metrics = list(dict.fromkeys(one.metric for one in subset))
    rows = []
    for policy in dict.fromkeys(one.policy for one in subset):
        own = {one.metric: one for one in subset if one.policy == policy}
        rows.append([Cell(short_name(policy)), *[_value(own.get(name), None) for name in metrics]])
    note = "; ".join(f"{size}: {win}/{tie}/{lost} %" for size, (win, tie, lost) in paper.STORIES.items())
    return Table(
        "Story generation", ["policy", *metrics], rows, [f"The paper, TOVA wins/tie/full wins: {note}."], subset
    )


def speed_table(records: Sequence[Record]) -> Table | None:
    """Every throughput, with the result of the kernel check before it."""
    subset = [one for one in records if one.metric.endswith("tokens/s")]
    rows = []
    for one in subset:
        settings = {
            name: value for name, value in one.settings.items() if name in ("batch", "chunk", "lanes", "compiled")
        }
        where = ", ".join(f"{name} {value}" for name, value in (one.cell | settings).items())
        facts = [one.policy, one.metric.removesuffix(" tokens/s"), where]
        gate = str(one.settings.get("gate", "")).split(":")[0]
        rows.append([*map(Cell, facts), _value(one, None), Cell(gate), Cell(one.machine)])
    note = ", ".join(f"{size}: {gain:g}" for size, gain in zip(paper.SPEED_SIZES, paper.THROUGHPUT, strict=True))
    notes = [f"The paper, one V100, relative to 4,096 at the largest batch of each size: {note}."]
    notes += sorted({f"Note on a row: {one.settings['note']}." for one in subset if "note" in one.settings})
    return Table("Speed", ["policy", "what", "where", "tokens/s", "kernels checked", "machine"], rows, notes, subset)


def other_tables(records: Sequence[Record]) -> Iterator[Table]:
    """Records that no other table shows, such as those of experiments/questions."""
    known = ("pg19", "squality", "qasper", "extrapolation", "needle", "turns", "story", "retention", "benchmark")
    for task in dict.fromkeys(one.task for one in records if one.task not in known):
        subset = [one for one in records if one.task == task]
        names = list(dict.fromkeys(name for one in subset for name in one.cell))
        rows = [
            [
                Cell(one.policy),
                *[Cell(str(one.cell.get(name, ""))) for name in names],
                Cell(one.metric),
                _value(one, None),
            ]
            for one in subset
        ]
        yield Table(task[:1].upper() + task[1:], ["policy", *names, "metric", "value"], rows, [], subset)


# the tables under each figure
TABLES_BY_FIGURE: dict[str, tuple[Callable[[Sequence[Record]], Table | None], ...]] = {
    "perplexity": (perplexity_table, gap_table),
    "score": (score_table,),
    "running": (running_table,),
    "retention": (retention_table,),
    "words": (words_table,),
    "throughput": (speed_table,),
    "turns": (recall_table,),
    "story": (story_table,),
}


def _sizes(line: Sequence[Record]) -> list[float]:
    return sorted({one.capacity for one in line if one.capacity})


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


def _paper_note() -> str:
    return f"Lines and columns marked paper: {paper.MODEL}, as printed; another model, so compare shapes, not values."
