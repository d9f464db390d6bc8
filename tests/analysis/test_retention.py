"""Which tokens stay: numbers worked out by hand on small traces, and whole measurements on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from msrnn import RNN, Trace
from msrnn.analysis import measure, paper, retention
from msrnn.core.trace import ALIVE
from msrnn.system.downloads import cache_folder


def trace_of(*layers: list[list[int]], policy: str = "tova:2") -> Trace:
    """Deaths by layer and unit; 99 is alive."""
    deaths = [torch.tensor([units], dtype=torch.int32) for units in layers]
    return Trace([torch.where(one == 99, ALIVE, one) for one in deaths], policy)


# six tokens, two slots: layer 0 is a window, layer 1 keeps the first token and the newest
WINDOW, FIRST = [[2, 3, 4, 5, 99, 99]], [[99, 2, 3, 4, 5, 99]]


def window_trace(length: int, capacity: int) -> Trace:
    """A window of `capacity`: a token is last visible `capacity` steps after its own."""
    deaths = torch.arange(length, dtype=torch.int32) + capacity
    return Trace([torch.where(deaths < length, deaths, ALIVE)[None, None]], f"window:{capacity}")


def test_steps_kept_counts_the_steps_at_which_a_token_was_visible() -> None:
    steps = retention.steps_kept(trace_of(WINDOW, FIRST))
    assert steps.tolist() == [[3, 3, 3, 3, 2, 1], [6, 2, 2, 2, 2, 1]]


@pytest.mark.parametrize("size, printed", [*zip(paper.WORD_SIZES, paper.STEPS_KEPT["all"], strict=True)])
def test_the_mean_steps_kept_are_the_papers(size: int, printed: int) -> None:
    """With 4,096 tokens the mean depends on the capacity alone, whatever the policy; the paper prints it."""
    assert round(float(retention.steps_kept(window_trace(4096, size)).mean())) == printed


def test_recent_is_what_a_window_would_hold() -> None:
    trace = trace_of(WINDOW, FIRST)
    assert retention.recent_share(trace, 5).tolist() == [1, 0.5]
    assert retention.sampled_steps(trace) == [2, 3, 4, 5]
    assert retention.mean_recent_share(trace).tolist() == [1, 0.5]


def test_held_at_the_end() -> None:
    trace = trace_of(WINDOW, FIRST, [[99, 2, 3, 4, 5, 99], [2, 3, 4, 5, 99, 99]])
    assert retention.held_at_end(trace, [0]).tolist() == [0, 1, 0.5]
    assert retention.held_at_end(trace, retention.EARLY).tolist() == pytest.approx([0.4, 0.2, 0.3])
    with pytest.raises(ValueError, match="6 tokens"):
        retention.held_at_end(trace, [6, 7])


def test_survival_counts_only_tokens_old_enough() -> None:
    result = retention.survival(trace_of(WINDOW, FIRST), [0, 1, 2, 5])
    assert result[0].tolist() == [1, 1, 0, 0]
    assert result[1].tolist() == pytest.approx([1, 1 / 5, 1 / 4, 1])
    with pytest.raises(ValueError, match="6 steps old; ask for ages from 0 to 5"):
        retention.survival(trace_of(WINDOW), [6])


def test_agreement_of_layers() -> None:
    trace = trace_of(WINDOW, FIRST, FIRST)
    square = retention.layer_agreement(trace)
    assert square[0, 1] == square[1, 0] == pytest.approx(1 / 3)  # {s-1, s} and {0, s}: one of three
    assert square[1, 2] == 1
    older = retention.layer_agreement(trace, only_older=True)
    assert older[0, 1] == 0
    assert older[1, 2] == 1
    assert older[0, 0].isnan()  # a window holds nothing older
    assert retention.off_diagonal(square) == pytest.approx((1 / 3 + 1 / 3 + 1) / 3)


def test_chance_is_what_random_choices_would_share() -> None:
    """Two layers keep 30 of 300 old tokens each, at random: the formula tells how many they share."""
    torch.manual_seed(0)
    length, layers = 400, []
    for _ in range(12):
        deaths = torch.arange(length, dtype=torch.int32) + 70
        deaths[torch.randperm(300)[:30]] = ALIVE
        layers.append(torch.where(deaths < length, deaths, ALIVE)[None, None])
    trace = Trace(layers, "tova:100")
    last = retention._shares(trace, length - 1, 0, only_older=True)
    real = retention.off_diagonal(retention._overlaps(last))
    assert retention.chance_agreement(trace) == pytest.approx(real, abs=0.05)


def test_agreement_of_heads_and_distinct_tokens() -> None:
    units = trace_of([WINDOW[0], FIRST[0]], [FIRST[0], FIRST[0]], policy="tova-head:2")
    assert retention.head_agreement(units).tolist() == pytest.approx([1 / 3, 1])
    assert retention.distinct(units).tolist() == pytest.approx([1.5, 1])
    assert retention.head_agreement(trace_of(WINDOW)).isnan().all()


def test_layer_wise_against_head_wise() -> None:
    one, other = trace_of(FIRST, FIRST), trace_of([FIRST[0], FIRST[0]], [WINDOW[0], WINDOW[0]])
    assert retention.agreement_with(one, other).tolist() == pytest.approx([1, 1 / 3])
    with pytest.raises(ValueError, match="cannot be compared"):
        retention.agreement_with(one, trace_of(FIRST))


@pytest.mark.slow
def test_a_trace_of_a_real_run_keeps_what_its_policy_promises(llama: Any) -> None:
    """window+4 holds the first four to the end and is recent but for them."""
    ids = torch.randint(2, 64, (60,), generator=torch.Generator().manual_seed(0))
    trace = measure.trace_text(llama(), ids.tolist(), "window+4:12")
    assert retention.held_at_end(trace, range(4)).tolist() == [1, 1, 1]
    assert retention.held_at_end(trace, range(4, 25)).tolist() == [0, 0, 0]
    assert retention.recent_share(trace, 59).tolist() == pytest.approx([8 / 12] * 3)
    assert float(retention.layer_agreement(trace).min()) == 1


WORDS = (
    'The keeper\'s lamp was lit. "Come in," said Ann to Bob.\nThe ships of the fleet lay (all of them) at $5 a day. '
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from msrnn.hf import load as models

    return AutoTokenizer.from_pretrained(models.bundled())


def wide(llama: Any, tokenizer: Any) -> Any:
    return llama(vocab_size=len(tokenizer), max_position_embeddings=512)


@pytest.mark.slow
def test_measure_gives_records_of_everything(llama: Any, tokenizer: Any, tmp_path: Path, one_thread: None) -> None:
    model, texts = wide(llama, tokenizer), {"a": WORDS * 4, "b": WORDS[::-1] * 4}
    records = measure.measure(model, tokenizer, texts, ["tova:16", "tova-head:16"], length=90, traces=tmp_path)
    result = {(one.policy, one.metric, tuple(one.cell.items())): one for one in records}
    mean = result["tova:16", "steps kept", ()]
    assert mean.value == pytest.approx(float(retention.steps_kept(window_trace(90, 16)).mean()))
    assert mean.low is not None
    assert (mean.groups, mean.task, mean.capacity, mean.settings["texts"]) == (2, "retention", 16, ["a", "b"])
    classes = {
        key[2][0][1]: one
        for key, one in result.items()
        if key[0] == "tova:16" and key[2][:1] and key[2][0][0] == "class"
    }
    assert {"DT", "NN", "POS", ".", "newline"} <= set(classes)
    assert sum(one.samples for one in classes.values()) == 180  # every token has one class
    weighed = sum(one.value * one.samples for one in classes.values()) / 180
    assert weighed == pytest.approx(mean.value)
    for metric in ("recent share", "agreement of layers", "perplexity"):
        assert result["tova:16", metric, ()].value > 0
    for metric in ("first token held", "tokens 2 to 25 held"):
        assert 0 <= result["tova:16", metric, ()].value <= 1
    assert ("tova-head:16", "agreement of heads", ()) in result
    assert ("tova:16", "agreement of heads", ()) not in result
    assert 0 < result["tova-head:16", "agreement with tova:16", ()].value < 1
    assert (
        result["tova:16", "held by age", (("age", 1),)].value > result["tova:16", "held by age", (("age", 32),)].value
    )


def test_sampled_steps_begin_when_every_unit_that_evicts_has_begun() -> None:
    late, never = [[99, 99, 4, 5, 99, 99]], [[99] * 6]
    assert retention.sampled_steps(trace_of(WINDOW, late)) == [4, 5]
    assert retention.sampled_steps(trace_of(WINDOW, never)) == [2, 3, 4, 5]
    assert retention.sampled_steps(trace_of(never)) == [5]
    assert retention.sampled_steps(trace_of([WINDOW[0], late[0]])) == [4, 5]  # KV heads of their own size


def test_a_profile_is_measured_layer_by_layer(llama: Any, tokenizer: Any, tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    profile.write_text('{"capacities": [8, 16, 24]}')
    policy, options = f"tova:16,profile={profile}", {"length": 60, "words": False, "traces": tmp_path / "traces"}
    model = wide(llama, tokenizer)
    records = measure.measure(model, tokenizer, WORDS * 4, ["tova:16", policy], **options)
    held = {one.cell.get("layer"): one for one in records if (one.policy, one.metric) == (policy, "any token held")}
    assert [held[layer].value * 60 for layer in range(3)] == pytest.approx([8, 16, 24])
    assert held[None].capacity == 16
    assert [one.policy for one in records if one.metric == "agreement with tova:16"] == [policy]
    profile.write_text('{"capacities": [24, 16, 8]}')  # made anew: the trace under its name is not it
    again = measure.measure(model, tokenizer, WORDS * 4, policy, **options)
    first = next(one for one in again if one.cell == {"layer": 0} and one.metric == "any token held")
    assert first.value == pytest.approx(0.4)


def test_traces_are_used_again(llama: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide(llama, tokenizer)
    options = {"length": 60, "words": False, "traces": tmp_path}
    first = measure.measure(model, tokenizer, WORDS * 4, "tova:16", **options)
    trace_text = measure.trace_text

    def forbidden(*_: Any) -> Trace:
        raise AssertionError("a trace was there")

    monkeypatch.setattr(measure, "trace_text", forbidden)
    again = measure.measure(model, tokenizer, WORDS * 4, "tova:16", **options)
    assert [(one.metric, one.value) for one in first] == [(one.metric, one.value) for one in again]
    with pytest.raises(AssertionError):  # another text under the same name is read
        measure.measure(model, tokenizer, WORDS[10:] * 4, "tova:16", **options)
    monkeypatch.setattr(measure, "trace_text", trace_text)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "policy, text, output",
    [
        ("full", WORDS * 4, "full keeps everything"),
        ("tova:512", WORDS * 4, "text has 60 tokens, so nothing ever leaves tova:512"),
        ([], WORDS, "at least one text and one policy"),
    ],
)
def test_what_cannot_be_seen_is_refused(llama: Any, tokenizer: Any, policy: Any, text: str, output: str) -> None:
    with pytest.raises(ValueError, match=output):
        measure.measure(wide(llama, tokenizer), tokenizer, text, policy, length=60, words=False)


def test_the_reading_is_that_of_the_rnn(llama: Any) -> None:
    ids = torch.randint(2, 64, (50,), generator=torch.Generator().manual_seed(3))
    rnn = RNN(llama(), "tova:8")
    _, state = rnn.read(ids, rnn.start(trace=True))
    trace = measure.trace_text(rnn.model, ids.tolist(), "tova:8")
    assert all(torch.equal(a, b) for a, b in zip(trace.deaths, state.trace.deaths, strict=True))


def test_the_cache_is_the_users() -> None:
    assert cache_folder().name


@pytest.mark.slow
def test_the_command_measures_and_plot_and_report_show_it(
    llama: Any, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    from msrnn.cli import main

    folder, text, out = tmp_path / "tiny", tmp_path / "text.txt", tmp_path / "out.jsonl"
    wide(llama, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text.write_text(WORDS * 4)
    options = ["--model", str(folder), "--tokens", "60", "--no-words", "-q", "-o", str(out)]
    policies = ["--policy", "tova:16", "--policy", "tova-head:16"]
    assert main(["retention", str(text), *policies, *options, "--traces", str(tmp_path / "traces")]) == 0
    output = capsys.readouterr().out
    assert "| tova-head:16 |" in output
    assert len(list((tmp_path / "traces").iterdir())) == 2
    one = str(next((tmp_path / "traces").iterdir()))
    assert main(["plot", one, "-o", str(tmp_path / "figures"), "--figure", "layers"]) == 0
    assert [path.name for path in (tmp_path / "figures").iterdir()] == [f"{Path(one).stem}-layers.png"]
    assert main(["report", str(out), one, "-o", str(tmp_path / "page.html")]) == 0
    assert "how much of what two layers hold" in (tmp_path / "page.html").read_text().lower()


@pytest.mark.parametrize(
    "arguments, output",
    [
        (["none.txt", "-o", "x.jsonl"], "there is no file none.txt"),
        ([".", "-o", "x.jsonl"], "has no *.txt"),
        (["{text}", "-o", "."], "is a folder"),
        (["{text}", "-o", "{empty}/x.jsonl"], "empty.md is a file, not a folder"),
        (["{text}", "-o", "x.jsonl", "--policy", "tovo:5"], "unknown policy 'tovo:5'"),
        (["{empty}", "-o", "x.jsonl"], "is empty"),
    ],
)
def test_bad_input_gets_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    output: str,
) -> None:
    from msrnn.cli import main

    (tmp_path / "at").mkdir()
    monkeypatch.chdir(tmp_path / "at")
    (tmp_path / "text.md").write_text(WORDS)
    (tmp_path / "empty.md").touch()
    places = {"text": str(tmp_path / "text.md"), "empty": str(tmp_path / "empty.md")}
    assert main(["retention", *[argument.format(**places) for argument in arguments]]) == 2
    error = capsys.readouterr().err
    assert output in error
    assert error.count("\n") == 1
