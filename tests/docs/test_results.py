"""docs/results.md says what the records say: every table is compared with them, cell by cell."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from msrnn.analysis import paper
from msrnn.eval.statistics import Interval, bootstrap
from tests.docs import pages
from tests.docs.records import Record, close, find, load, numbers, passkey, perplexity, policy, recall, same

SIZES = (64, 128, 256, 512, 1024, 2048)
LENGTHS = (2048, 8192, 32768)  # of a peer's prompt
COUNTED = ("f1", "count")


def tables(heading: str) -> list[list[list[str]]]:
    return pages.tables("docs/results.md", heading)


def compare(rows: list[list[str]], columns: list[int], record: Callable[[str, int], Record]) -> int:
    """All cells of a table whose columns are numbers; how many there were."""
    count = 0
    for label, *cells in rows:
        assert len(cells) == len(columns), label
        for column, cell in zip(columns, cells, strict=True):
            if cell:
                same(cell, record(label, column))
                count += 1
    return count


def columns(header: list[str]) -> list[int]:
    return [int(cell.replace(",", "")) for cell in header[1:]]


def test_language_modelling() -> None:
    header, *rows = tables("Language modelling")[0]
    assert tuple(columns(header)) == SIZES
    assert compare(rows, columns(header), perplexity) == 13 * 6 - 2


def test_differences_to_tova() -> None:
    header, *rows = tables("Language modelling")[1]
    for label, *cells in rows:
        for size, cell in zip(columns(header), cells, strict=True):
            value, low, high = map(float, numbers(cell))
            assert low - 0.005 <= value <= high + 0.005
            assert abs(value - perplexity(label, size)["value"] + perplexity("tova", size)["value"]) <= 0.00501, cell


def test_the_papers_perplexities() -> None:
    header, *rows = tables("Language modelling")[2]
    assert tuple(columns(header)) == paper.SIZES
    for label, *cells in rows:
        assert tuple(map(float, cells)) == paper.PERPLEXITY[policy(label, 1).removesuffix(":1")]


def test_beyond_the_trained_length() -> None:
    header, *rows = tables("Beyond the trained length")[0]

    def record(label: str, position: int) -> Record:
        name, _, positions = label.rpartition(", ")
        return find(
            "extrapolation", "running perplexity", policy(name, 512), position=position, positions=positions.strip("`")
        )

    assert compare(rows, columns(header), record) == 13 * 6 - 2


def far(task: str, label: str, start: int, end: int) -> float:
    """Perplexity of the tokens from `start` to `end` over all books."""
    record = next(one for one in load("far") if (one["task"], one["policy"]) == (task, policy(label)))
    nats = [book[f"nll {last}"] for book in record["parts"].values() for last in range(start + 1000, end + 1, 1000)]
    return math.exp(sum(nats) / len(nats) / 1000)


def test_far_with_plain_positions() -> None:
    header, *rows = next(one for one in tables("Beyond the trained length") if one[0][0] == "plain positions")
    records = {one["policy"]: one for one in load("part/far_plain")}
    assert len(rows) == len(records) == 3
    for label, *cells in rows:
        parts = records[policy(label)]["parts"].values()
        assert len(parts) == 2
        for title, cell in zip(header[1:], cells, strict=True):
            start, end = (int(number.replace(",", "")) for number in title.split(" to "))
            nats = [book[f"nll {last}"] for book in parts for last in range(start + 1000, end + 1, 1000)]
            assert close(numbers(cell)[0], math.exp(sum(nats) / len(nats) / 1000)), (label, title)


@pytest.mark.parametrize("task,place,policies", [("far-reporting", 1, 2), ("far-all", 2, 4), ("far-choosing", 3, 4)])
def test_far_beyond_it_in_the_same_bytes(task: str, place: int, policies: int) -> None:
    header, *rows = tables("Beyond the trained length")[place]
    assert len(rows) == policies
    for label, *cells in rows:
        for title, cell in zip(header[1:], cells, strict=True):
            if title.startswith("slots older"):
                record = next(one for one in load("far") if (one["task"], one["policy"]) == (task, policy(label)))
                assert float(cell) == pytest.approx(record["settings"]["old"]["69632"], abs=0.0051)
                continue
            *start, end = map(int, (number.replace(",", "") for number in re.findall(r"\d+,000", title)))
            value, difference = far(task, label, *start or [0], end), "over" in title or "minus" in title
            expected = value - far(task, "window+4:512", *start or [0], end) if difference else value
            assert not cell or float(numbers(cell)[0]) == pytest.approx(expected, abs=0.0051), (label, title)


@pytest.mark.parametrize(
    "name,metric,title,policies", [("qasper", "f1", "QASPER", 8), ("squality", "rouge", "SQuALITY", 7)]
)
def test_questions_about_documents(name: str, metric: str, title: str, policies: int) -> None:
    header, *rows = tables("Questions about documents")[0]
    start = next(i for i, row in enumerate(rows) if row[0].startswith(title))
    mine = rows[start : start + policies]
    assert compare(mine, columns(header), lambda label, size: find(name, metric, policy(label, size))) >= 22
    assert len(rows) == 15


def test_differences_to_tova_on_qasper() -> None:
    """Paired over documents: how many exclude 0, and what is printed of those that do."""
    records = {one["policy"]: one for one in load("qasper") if one["metric"] == "f1"}
    labels = (
        "`window+4`",
        "`h2o`",
        "`fade`",
        "`tova` + profile",
        "`fade` + profile",
        "QASPER, short context",
        "`best`",
    )
    found: dict[str, list[Interval]] = {label: [] for label in labels}
    for label, size in product(labels, SIZES):
        if policy(label, size) in records:
            ours, tova = (records[policy(name, size)] for name in (label, "tova"))
            sums = [
                np.array([one["parts"][g][key] for g in sorted(tova["parts"])])
                for one in (ours, tova)
                for key in COUNTED
            ]
            found[label].append(bootstrap(sums, lambda s: s[0] / s[1] - s[2] / s[3], tova["seed"]))
    apart = {label: [one for one in all_of if one.low > 0 or one.high < 0] for label, all_of in found.items()}
    assert sum(len(found[label]) for label in labels[:5]) == 18
    assert {label for label in labels[:5] if apart[label]} == {"`fade` + profile"}
    text = " ".join(pages.text("docs/results.md").split("## Questions about documents")[1].split())
    printed = (
        ("`fade` + profile", "`fade` with the profile at 256 slots, ", ". "),
        ("QASPER, short context", "Of the four of short context three do, all below `tova`: ", " at 256,"),
        ("`best`", "It is ", " points above `tova:256`"),
    )
    assert len(found["QASPER, short context"]) == 4
    for label, start, end in printed:
        cells = re.findall(r"[-+]?\d[\d.]* \[.*?\]", text.split(start)[1].split(end)[0])
        for cell, interval in zip(cells, apart[label], strict=True):
            assert all(close(number, value) for number, value in zip(numbers(cell), interval, strict=True)), cell


def test_best_on_qasper_at_other_sizes() -> None:
    _, (header, *rows) = tables("Questions about documents")
    sizes = columns(header)
    assert sizes == [64, 128, 1024]
    assert len(rows) == 3
    found = {one["policy"]: one for one in load("part/qasper_best") if one["metric"] == "f1"}
    for column, size in enumerate(sizes, 1):
        tova, best = (found[f"{name}:{size}"] for name in ("tova", "best"))
        for (_, *cells), record in zip(rows[:2], (tova, best), strict=True):
            same(cells[column - 1], record)
        sums = [
            np.array([one["parts"][g][key] for g in sorted(tova["parts"])]) for one in (best, tova) for key in COUNTED
        ]
        difference = bootstrap(sums, lambda s: s[0] / s[1] - s[2] / s[3], tova["seed"])
        printed = numbers(rows[2][column])
        assert all(close(number, value) for number, value in zip(printed, difference, strict=True)), printed


def test_where_a_plain_policy_keeps_half_of_rulers_answers() -> None:
    """One does, on both models; every other loses most of full attention's."""
    most = {}
    for name in ("ruler", "tinyllama"):
        found = [one for one in load(name) if one["metric"] == "match" and one["cell"].get("kind") == "all"]
        values = {(one["policy"], one["cell"]["length"]): one["value"] for one in found}
        for (kind, length), value in values.items():
            if re.fullmatch(r"(window\+4|h2o|tova|fade):\d+", kind):
                most[name, kind, length] = value / values["full", length]
    half = {key: share for key, share in most.items() if share > 0.5}
    assert set(half) == {("ruler", "window+4:512", 1024), ("tinyllama", "window+4:512", 1024)}
    shares = " and ".join(f"{100 * share:.0f}" for share in half.values())
    assert f"where it keeps half ({shares} %)" in " ".join(pages.text("docs/results.md").split())


def test_recall_of_a_number() -> None:
    ((_, *rows),) = tables("Recall of a number")
    kinds = [(kind, length) for kind in ("passkey", "needle") for length in (1024, 2048, 4096)]
    assert len(rows) == 22
    for label, *cells in rows:
        for (kind, length), cell in zip(kinds, cells, strict=True):
            same(cell, passkey(label, None, kind, length))


def test_conversations() -> None:
    ((_, turns, *rows),) = tables("Conversations")
    slots = (256, 256, 512, 512, 512, 1024, 1024)
    assert len(rows) == 7
    for label, *cells in rows:
        for size, count, cell in zip(slots, columns(turns), cells, strict=True):
            same(cell, recall(label, size, count))


def test_stories() -> None:
    _, *rows = tables("Stories")[0]
    assert len(rows) == 9
    for label, *cells in rows:
        for metric, cell in zip(("full perplexity", "repetition", "tokens", "ended"), cells, strict=True):
            same(cell, find("story", metric, policy(label)))


def test_the_judge() -> None:
    _, *rows = tables("Stories")[1]
    names = ("full perplexity", "repetition", "wins", "ties", "losses", "agreement", "answered")
    assert len(rows) == 5
    for label, *cells in rows:
        for metric, cell in zip(names, cells, strict=True):
            if cell:
                same(cell, find("judge", metric, policy(label)))
    agreed = [record for record in load("judge") if record["metric"] == "agreement"]
    pairs = [part for record in agreed for part in record["parts"].values() if "judged" in part]
    assert (len(pairs), sum(part["agreement"] for part in pairs)) == (126, 2)


@pytest.mark.parametrize("name, table", [("retention", 0), ("tinyllama", 2)])
def test_which_tokens_stay(name: str, table: int) -> None:
    header, *rows = tables("Which tokens stay")[table]
    metrics = ["recent share", "first token held", "tokens 2 to 25 held", *["steps kept"] * 4, "agreement of layers",
               "agreement of layers on older tokens"]  # fmt: skip
    classes = {4: ".", 5: ")", 6: "POS"}
    assert len(rows) == len(metrics)
    for number, (metric, (_, *cells)) in enumerate(zip(metrics, rows, strict=True)):
        cell = {"class": classes[number]} if number in classes else {}
        for label, printed in zip(header[1:], cells, strict=True):
            same(printed, find(name, metric, policy(label), **cell))


def test_the_papers_steps_kept() -> None:
    header, *rows = tables("Which tokens stay")[1]
    classes = {
        "all tokens": "all",
        "possessive endings": "POS",
        "closing quotes": "''",
        "closing brackets": ")",
        "full stops": ".",
    }
    assert tuple(columns(header)) == paper.WORD_SIZES
    for label, *cells in rows:
        assert tuple(int(cell.replace(",", "")) for cell in cells) == paper.STEPS_KEPT[classes[label]]


def test_speed_on_a_gpu() -> None:
    ((_, *rows),) = tables("Speed on a GPU")
    largest = {one["policy"]: one for one in load("bench_h200") if one["kind"] == "largest"}
    step = {one["policy"]: one for one in load("bench_h200") if one["kind"] == "step" and one["batch"] == 48}
    for label, _, batch, rate, speedup, time, at48, papers, papers_speedup in rows:
        name = policy(label)
        assert batch == f"{largest[name]['batch']:,}"
        assert close(rate, largest[name]["tokens_per_s"])
        assert close(time.removesuffix(" ms"), 1000 * step[name]["median_s"])
        if name == "full":
            continue
        assert close(speedup, largest[name]["times_full"])
        assert close(at48, step[name]["times_full"])
        at = paper.SPEED_SIZES.index(int(name.split(":")[1]))
        assert (int(papers), float(papers_speedup)) == (paper.LARGEST_BATCH[at], paper.THROUGHPUT[at])


def test_speed_on_a_cpu() -> None:
    ((header, *rows),) = tables("Speed on a CPU")
    found = {(one["what"], one["run"], one.get("length")): one for one in load("cpu")}
    for (_, *cells), (what, length) in zip(rows, (("prefill", 4096), ("prefill", 8192), ("decode", 8192)), strict=True):
        for label, cell in zip(header[1:], cells, strict=True):
            record = found[what, policy(label), length]
            same(cell, {"value": record["ratio"], "low": record["ratio_spread"][0], "high": record["ratio_spread"][1]})


@pytest.mark.parametrize("table, prompt, continuation, count", [(0, 4096, 256, 13), (3, 1024, 128, 5)])
def test_peers(table: int, prompt: int, continuation: int, count: int) -> None:
    _, *rows = tables("Peers")[table]
    assert len(rows) == count

    def perplexity_of(run: str) -> float:
        value: float = find("peers", "perplexity", run, work="pg19", prompt=prompt, continuation=continuation)["value"]
        return value

    for label, printed, gap in rows:
        assert close(printed, perplexity_of(label))
        if gap:
            full = perplexity_of("llama.cpp full" if label.startswith("llama") else "transformers full")
            middle, low, high = map(float, numbers(gap))
            assert middle == pytest.approx(100 * (perplexity_of(label) / full - 1), abs=0.051)
            assert low <= middle <= high


def test_recall_of_peers() -> None:
    _, *rows = tables("Peers")[2]
    assert len(rows) == 13
    for label, ruler, *needles in rows:
        same(ruler, find("peers", "match", label, work="ruler", kind="all", length=2048))
        for kind, cell in zip(("needle", "passkey"), needles, strict=True):
            assert close(cell, find("peers", "recall", label, work="needle", kind=kind, length=2048)["value"])


def test_quantised_caches_of_peers() -> None:
    """Their bytes: codes of 4,096 tokens, and a scale and a shift of 16 bits for every 64 codes."""
    _, *rows = tables("Peers")[1]
    sized = [
        (one["policy"] + f":{one['capacity']}" * bool(one["capacity"]), one) for one in load("part/peers_quantised")
    ]
    records = {name: one for name, one in sized if one["groups"] == 7}
    full, values = records["transformers full"], 4096 * 30 * 3 * 64 * 2
    assert {label for label, *_ in rows} == set(records)
    for label, state, printed, gap in rows:
        assert close(printed, records[label]["value"])
        if gap:
            middle, low, high = map(float, numbers(gap))
            assert middle == pytest.approx(100 * (records[label]["value"] / full["value"] - 1), abs=0.051)
            assert low <= middle <= high
        if label.endswith("bits"):
            bits = int(label.split()[-2])
            assert close(state, values * (bits + 32 / 64) / 8 / 2**20)
    states = {label.split()[-1]: float(state) for label, state, *_ in rows}
    assert states["best:1136"] < 25.3
    assert states["best:631"] < 14.1


@pytest.mark.parametrize("file,title", [("peers_vllm", "in vLLM"), ("peers_vllm_bytes", "in the bytes of fp8")])
def test_caches_in_vllm(file: str, title: str) -> None:
    records = {(one["policy"], one["metric"]): one["value"] for one in load(f"part/{file}")}
    _, *rows = next(table for table in tables("Peers") if table[0][0] == title)
    full, plain = records["vllm full", "perplexity"], 4096 * 30 * 3 * 64 * 2 * 2 / 2**20
    states = {"vllm full": plain, "vllm fp8": plain / 2}
    assert {label for label, *_ in rows} == {policy for policy, _ in records}
    for label, state, printed, gap, prefill, step in rows:
        value = records[label, "perplexity"]
        assert close(printed, value)
        assert close(prefill, records[label, "prefill seconds"])
        assert close(step, 1e3 * records[label, "step seconds"])
        assert label not in states or close(state, states[label])
        if gap:
            middle, low, high = map(float, numbers(gap))
            assert middle == pytest.approx(100 * (value / full - 1), abs=0.051)
            assert low <= middle <= high


def test_all_quantised_caches() -> None:
    """Perplexities are those of the tables before it."""
    times = {(one["policy"], one["capacity"], one["metric"]): one["value"] for one in load("part/quantised_times")}
    before = {row[0]: row for table in tables("Peers") if len(table[0]) in (4, 6) for row in table[1:]}
    _, *rows = next(table for table in tables("Peers") if table[0][0] == "quantised caches")
    assert len(rows) == 10
    for label, state, printed, _, prefill, step in rows:
        name, _, size = label.partition(":")
        key = name, int(size) if size else None
        assert close(prefill, times[*key, "prefill seconds"])
        assert close(step, 1e3 * times[*key, "step seconds"])
        known = before.get(label) or before[name]
        assert name.startswith("vllm msrnn") or [state, printed] == known[1:3]


def test_time_of_peers_on_a_cpu() -> None:
    records = {(one["policy"], one["metric"]): one["value"] for one in load("part/peers_cpu")}
    _, *rows = next(table for table in tables("Peers") if table[0][0] == "on a CPU")
    assert {label for label, *_ in rows} == {policy for policy, _ in records}
    for label, prefill, step in rows:
        assert close(prefill, records[label, "prefill seconds"])
        assert close(step, 1e3 * records[label, "step seconds"])


def test_time_and_memory_of_peers() -> None:
    header, *rows = tables("Peers")[4]
    columns = [(metric, length) for metric in ("peak bytes", "prefill seconds", "step seconds") for length in LENGTHS]
    units = {"peak bytes": 2**20, "prefill seconds": 1, "step seconds": 1e-3}
    assert (len(header), len(rows)) == (10, 7)
    for label, *cells in rows:
        for (metric, length), cell in zip(columns, cells, strict=True):
            value = find("peers", metric, label, work="memory", length=length)["value"]
            assert close(cell, value / units[metric]), (label, metric, length)


def test_every_record_file_is_named_in_the_docs() -> None:
    named = " ".join(pages.text(name) for name in pages.NAMES)
    files = sorted((pages.ROOT / "results").rglob("*.json*"))
    assert len(files) > 20
    for file in files:
        path = file.relative_to(pages.ROOT).as_posix()
        assert re.search(rf"{re.escape(path)}\b", named), f"no page says what {path} is"
