"""Records become tables and figures: what is shown is what the records say."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from msrnn.analysis.compare import perplexity_gap
from msrnn.analysis.extrapolation import running_perplexity
from msrnn.analysis.policy_names import family
from msrnn.analysis.records import ORDER, families, newest, read_results
from msrnn.analysis.speed import _comparable, speeds
from msrnn.analysis.style import line_styles, new_figure, plain_log_ticks, separate
from msrnn.analysis.table import perplexity_table, speed_table, tables, words_table
from msrnn.cli import main
from msrnn.eval.record import write_records
from tests.support.records import everything, extrapolation, perplexity, pg19, recall, record, retention

ROOT = Path(__file__).parents[2]


def test_tables_name_no_profile_at_length() -> None:
    policy = "tova:512,profile=some-model"
    selection = [
        one for one in everything() if one.policy == "tova:512" and one.task in ("extrapolation", "needle", "turns")
    ]
    text = "".join(table.markdown() for table in tables([replace(one, policy=policy) for one in selection]))
    assert "tova:512 by layer, gaps positions" in text
    assert "some-model" not in text
    assert family(policy) == "tova by layer"


def test_families_come_in_the_papers_order() -> None:
    names = list(families([*pg19(), record("pg19", "new:64", "perplexity", 1.0)]))
    assert names == ["full", "baseline", "window", "window+4", "h2o", "tova-head", "tova", "tova+4", "new"]


def test_a_thing_measured_again_counts_once() -> None:
    old = record("pg19", "tova:64", "perplexity", 9.0)
    new = replace(old, value=8.0, date="2026-02-01T00:00:00+00:00")
    other = replace(old, settings={"chunk": 128})
    assert newest([old, new, other]) == [new, other]
    assert newest([new, old]) == [new]


def test_budgets_by_layer_stand_beside_their_average(tmp_path: Path) -> None:
    write_records(tmp_path / "r.jsonl", [record("pg19", "tova:256 by layer", "perplexity", 9.0, capacity=255.97)])
    assert read_results([tmp_path])[0].capacity == 256


def test_by_keyare_files_and_folders(results: Path, tmp_path: Path) -> None:
    assert len(read_results([results])) == len(everything())
    assert read_results([results.parent]) == read_results([results])
    (tmp_path / "run.samples.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="no result files"):
        read_results([tmp_path])
    with pytest.raises(ValueError, match="there is no file"):
        read_results([tmp_path / "none.jsonl"])
    (tmp_path / "bad.jsonl").write_text('{"metric": 1}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:1: not a whole record"):
        read_results([tmp_path / "bad.jsonl"])


def test_benchmarks_are_results() -> None:
    path = ROOT / "results" / "cpu.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(row for row in rows if (row["what"], row["run"], row.get("length")) == ("prefill", "tova:512", 4096))
    by_key = {(one.policy, one.metric, one.cell["length"]): one for one in read_results([path])}
    one = by_key["tova:512", "prefill tokens/s", 4096]
    assert one.value == pytest.approx(4096 / row["median_s"])
    assert one.low < one.value < one.high
    assert one.capacity == 512


def test_rows_of_msrnn_bench_are_results(tmp_path: Path) -> None:
    row = {"part": "table", "policy": "tova:256", "batch": 8, "context": 4096, "tokens_per_s": 100.0, "median_s": 0.1}
    row |= {"state_bytes": 800, "shape": "tiny", "dtype": "bfloat16", "machine": "m", "versions": {}, "commit": "c"}
    (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"out_of_memory": True}) + "\n")
    by_key = {one.metric: one for one in read_results([tmp_path / "b.jsonl"])}
    assert by_key["table tokens/s"].value == 100
    assert by_key["state bytes"].value == 100
    assert by_key["table tokens/s"].settings == {"batch": 8}


def test_an_opponent_by_our_own_kernel_is_full(tmp_path: Path) -> None:
    row = {"kind": "step", "policy": "window:99", "batch": 1, "context": 100, "tokens_per_s": 100.0, "median_s": 0.01}
    row |= {"shape": "tiny", "all_readings": {"exact": 0.02, "our kernel": 0.01}, "runs_s": [0.0125, 0.01, 0.005]}
    (tmp_path / "b.jsonl").write_text(json.dumps(row) + "\n")
    (one,) = read_results([tmp_path / "b.jsonl"])
    assert one.policy == "full"
    assert "window:99" in one.settings["reading"]
    assert (one.low, one.high, one.samples) == (80, 200, 3)


def test_prompts_are_compared_by_what_is_read(tmp_path: Path) -> None:
    row = {"kind": "prefill", "batch": 1, "length": 64, "tokens_per_s": 1.0, "median_s": 64.0, "shape": "tiny"}
    rows = [{"policy": "full"}, {"policy": "tova:4", "lanes": 12, "joined": True}]
    rows += [one | {"attention": "steady (query biases)"} for one in rows]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row | one) + "\n" for one in rows))
    full, tova, steady_full, steady_tova = read_results([tmp_path / "b.jsonl"])
    assert full.cell == tova.cell == {"length": 64, "batch": 1}, "fused projections are part of the pipelined prefill"
    assert steady_full.cell == steady_tova.cell != full.cell


def test_bars_are_of_what_both_have_done_each_once() -> None:
    cells = ({"batch": 1}, {"batch": 2})
    full, tova = (
        [record("benchmark", policy, "step tokens/s", 100.0, cell=cell) for cell in cells]
        for policy in ("full", "tova:256")
    )
    again = replace(tova[0], value=120.0, date="2999-01-01T00:00:00+00:00")
    drawn = _comparable(speeds([full[0], full[1], again, tova[0]]))
    assert sorted(mark.value for mark in drawn) == [100, 120]


def test_speeds_behind_a_failed_check_are_told_and_not_drawn() -> None:
    good = record("benchmark", "tova:256", "step tokens/s", 100.0)
    bad = replace(good, policy="tova:512", settings={"gate": "FAILED: off by 2", "note": "found here"})
    assert [mark.record for mark in speeds([good, bad])] == [good]
    table = speed_table([good, bad])
    assert table is not None
    assert [row[4].text for row in table.rows] == ["", "FAILED"]
    assert "Note on a row: found here." in table.notes


def test_the_gap_is_paired_by_text() -> None:
    """Texts differ by far more than the policies, and the interval of the difference stays small."""
    full, tova = perplexity("pg19", "full", 3.0), perplexity("pg19", "tova:64", 3.1)
    gap = perplexity_gap(tova, full)
    assert gap is not None
    assert gap.value == pytest.approx(np.exp(0.1) - 1, rel=0.02)
    assert gap.low is not None
    assert gap.high is not None
    assert gap.low <= gap.value <= gap.high < gap.value + 0.01
    assert perplexity_gap(tova, replace(full, parts={"book0": full.parts["book0"]})) is None
    alone = {"parts": {"book0": {"nll": 100.0, "tokens": 50.0}}}
    assert perplexity_gap(replace(tova, **alone), replace(full, **alone)) == (0.0, None, None)


def test_the_table_has_ours_and_the_papers() -> None:
    table = perplexity_table(pg19())
    assert table is not None
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["tova, paper"] == ["9.53", "8.32", "7.71", "7.41", "7.25", "7.17", "7.16"]
    tova = [one for one in pg19() if one.policy.startswith("tova:")]
    assert rows["tova"] == [f"{one.value:.2f}" for one in tova]
    assert rows["full"] == rows["full"][:1] * 7
    best = [row[0].text for row in table.rows if row[1].best]
    assert best == ["tova"]
    assert f"({tova[0].low:.2f} to {tova[0].high:.2f})" in table.markdown()


def test_every_table_is_square() -> None:
    selection = list(tables(everything()))
    assert len(selection) >= 7
    for table in selection:
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title
        assert len(set(table.columns)) == len(table.columns), table.title


def test_word_classes_stand_beside_the_papers() -> None:
    table = words_table(retention())
    assert table is not None
    assert table.columns == ["class", "tova:256", "tova:256, paper", "tova-head:256", "tova:512", "tova:512, paper"]
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["all"] == ["249", "249", "249", "481", "481"]
    assert rows["POS (possessive 's)"][1] == "1134"
    assert "$ (dollar)" not in rows  # too few tokens to say anything
    shorter = words_table([replace(one, settings={"length": 1000}) for one in retention()])
    assert shorter is not None
    assert shorter.columns == ["class", "tova:256", "tova-head:256", "tova:512"]  # the paper's texts were longer


def test_names_beside_lines_do_not_touch() -> None:
    moved = separate([1, 1, 1, 50, 99], 10, 0, 100)
    assert all(b - a > 9.9 for a, b in pairwise(moved))
    assert min(moved) >= -0.1
    assert max(moved) <= 100.1
    assert separate([10, 50, 90], 10, 0, 100) == [10, 50, 90]
    crowded = separate([5] * 30, 10, 0, 100)
    assert crowded == sorted(crowded)


def test_lines_differ_in_more_than_colour() -> None:
    ours = ["fade", "fade by layer", "tova by layer"]
    styles = line_styles([*ORDER[1:], *ours, "x", "y", "z"])
    assert len({style.marker for style in styles.values()}) == len(styles)
    assert len({style.colour for style in styles.values()}) == len(styles)
    assert {name: line_styles([name])[name] for name in ours} == {
        name: styles[name] for name in ours
    }  # whoever else is there
    greys = [0.3 * r + 0.59 * g + 0.11 * b for r, g, b in (_rgb(style.colour) for style in styles.values())]
    assert max(greys) < 0.8  # all visible on white


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_plot_draws_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_records(tmp_path / "some.jsonl", [*pg19(), *retention()])
    assert main(["plot", str(tmp_path / "some.jsonl"), "-o", str(tmp_path / "new")]) == 0
    output = capsys.readouterr()
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert files == [f"{name}.png" for name in ("perplexity", "retention", "throughput", "words")]
    assert len(output.out.splitlines()) == len(files)
    for file in files:
        picture = np.asarray(Image.open(tmp_path / "new" / file).convert("L"))
        assert picture.shape[1] > 700
        assert 0.005 < (picture < 200).mean() < 0.6, file


def test_every_kind_of_positions_has_a_row_of_its_own(tmp_path: Path) -> None:
    plain = [one for one in extrapolation() if one.cell["positions"] == "plain"]
    few, all_kinds = (
        Image.open(running_perplexity(records, tmp_path / "r.png")).size for records in (plain, extrapolation())
    )
    assert few[0] == all_kinds[0]
    assert 2 < all_kinds[1] / few[1] < 3


def test_numbers_of_an_axis_are_round() -> None:
    axes = new_figure(4, 3).subplots()
    axes.set_yscale("log")
    for low, high in ((21.89, 31.4), (24.1, 25.3), (21.0, 126.0)):
        axes.set_ylim(low, high)
        plain_log_ticks(axes)
        labels = [tick.get_text() for tick in axes.get_yticklabels()]
        assert 3 <= len(labels) <= 12
        assert all(low <= float(text) <= high and len(text.replace(".", "")) <= 3 for text in labels), labels


def test_the_same_records_give_the_same_picture(tmp_path: Path) -> None:
    from msrnn.analysis.curves import perplexity_by_capacity

    one, two = (perplexity_by_capacity(pg19(), tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert one == two
    changed = [replace(r, value=r.value * 1.2) if r.policy == "tova:64" else r for r in pg19()]
    assert perplexity_by_capacity(changed, tmp_path / "c.svg").read_bytes() != one


def test_figures_of_little(tmp_path: Path) -> None:
    """One policy, one size, one text, no full: drawn all the same."""
    few = [perplexity("pg19", "tova:64", 3.0, low=None, high=None, groups=1)]
    path = tmp_path / "few.jsonl"
    write_records(path, [*few, *[one for one in recall() if one.policy == "full" and one.task == "turns"]])
    assert main(["report", str(path), "-o", str(tmp_path / "few.html")]) == 0
    assert (tmp_path / "few.html").read_text().count("<img") == 3


@pytest.mark.parametrize(
    "arguments, output",
    [
        (["--figure", "wrods"], "unknown figure 'wrods'; did you mean 'words'? Allowed: perplexity, "),
        (["--figure", "map"], "records and 0 traces have nothing for the figure 'map'"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], output: str
) -> None:
    before = sorted(tmp_path.iterdir())
    assert main(["plot", str(results), "-o", str(tmp_path / "new" / "figures"), *arguments]) == 2
    assert sorted(tmp_path.iterdir()) == before
    error = capsys.readouterr().err
    assert output in error
    assert error.count("\n") == 1


def test_a_folder_for_no_figures_is_not_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for output, reason in (
        ("figures", "0 records and 0 traces have nothing"),
        ("empty.jsonl", "is a file; give a fol"),
    ):
        assert main(["plot", str(tmp_path / "empty.jsonl"), "-o", str(tmp_path / output)]) == 2
        assert reason in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["empty.jsonl"]


def test_recall_of_policies_that_were_not_all_run_at_every_capacity(tmp_path: Path, capsys: Any) -> None:
    """A row of panels for each capacity and kind, and room left where a policy was not run."""
    more = [replace(one, policy="tova:256", capacity=256) for one in recall() if one.policy == "tova:512"]
    assert {one.task for one in more} == {"needle", "turns"}
    write_records(tmp_path / "r.jsonl", [*recall(), *more])
    for name in ("needle", "turns"):
        assert main(["plot", str(tmp_path / "r.jsonl"), "-o", str(tmp_path / "out"), "--figure", name]) == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["needle.png", "turns.png"]


def test_records_survive_a_file(results: Path) -> None:
    assert [asdict(one) for one in read_results([results])] == [asdict(one) for one in newest(everything())]


def test_two_models_get_a_figure_each(tmp_path: Path, capsys: Any) -> None:
    both = [*pg19(), *[replace(one, model="Other") for one in pg19()]]
    write_records(tmp_path / "two.jsonl", both)
    assert main(["plot", str(tmp_path / "two.jsonl"), "-o", str(tmp_path / "out"), "--figure", "perplexity"]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["perplexity-Other.png", "perplexity-Tiny.png"]
