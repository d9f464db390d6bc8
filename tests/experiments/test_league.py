"""The league, the residual slot and long texts, on a tiny model: scripts end to end, and what their loops mean."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from msrnn.eval.perplexity import token_nll
from msrnn.eval.record import read_records
from msrnn.policy import parse_policy

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def data(books: Callable[[int], Path]) -> Path:
    return books(150)


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    module.main()


@pytest.mark.slow
def test_the_league_resumes_and_makes_a_table(
    data: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import league

    monkeypatch.setattr(league, "BUILT_IN", ("tova", "fade"))
    monkeypatch.setattr(league, "RULES", ("key_norm", "lagged"))
    monkeypatch.setattr(league, "FADING", ())
    monkeypatch.setattr(league, "TURNS", league.turns.Settings(turns=(0, 2), tokens_per_turn=20, conversations=2))
    out = tmp_path / "out" / "league.jsonl"
    options = ["--data", str(data), "--model", model, "--length", "64", "--chunks", "1", "--out", str(out)]
    options += ["--capacity", "16", "--tasks", "turns"]
    run(league, monkeypatch, *options)
    results = read_records(out)
    policies = {"full", "tova:16", "fade:16", "key_norm:16"}
    policies |= {"key_norm-head+4:16,last=1/2", "lagged-head+4:16,last=1/2"}
    for half in ("choosing", "reporting"):
        assert {one.policy for one in results if one.task == f"league-{half}"} == policies
    books = [set(one.parts) for one in results if one.policy == "full" and one.metric == "perplexity"]
    assert books[0] | books[1] == {"0", "1", "2", "3"}
    assert not books[0] & books[1]
    assert {one.task for one in results if one.metric == "recall"} == {"league-turns"}
    measured = (tmp_path / "out" / "league.pg19.measured.jsonl").read_text()
    run(league, monkeypatch, *options)
    assert (tmp_path / "out" / "league.pg19.measured.jsonl").read_text() == measured
    capsys.readouterr()
    run(league, monkeypatch, *options, "--table")
    lines = capsys.readouterr().out.splitlines()
    assert "tiny, 16 slots" in lines
    names = {line.split("`")[1].split(":")[0].split("-")[0] for line in lines if line.startswith("| `")}
    assert names == {"tova", "fade", "key_norm", "lagged"}
    in_bytes = tmp_path / "bytes.jsonl"
    run(league, monkeypatch, *options[:8], "--out", str(in_bytes), "--capacity", "16", "--same-bytes", str(out))
    fitted = {one.policy.split(":")[0].split("-")[0]: one.capacity for one in read_records(in_bytes)}
    assert set(fitted) == {"full", *names}
    assert fitted["tova"] == 16
    assert all(fitted[name] < 16 for name in names - {"tova"}), "a score for every token takes bytes"


def test_everybody_takes_part_without_a_perplexity_and_rules_stand_in_fades_frame() -> None:
    import league

    players = ["tova:256", "fade:256", "random:256", "window_attention-head:256,last=1/2"]
    everybody = league.with_everybody(players, 256)
    others = everybody[len(players) :]
    assert everybody[: len(players)] == players
    assert {"redundancy-head+4:256,last=1/2", "lagged-head+4:256,last=1/2", "h2o:256"} <= set(others)
    assert {"tova:256,gain=value_norm", "output_aware-head:256,last=1/2,momentum=1-1.5/k"} <= set(others)
    assert not any(policy.startswith(("random", "window_attention")) for policy in others)
    assert len(set(everybody)) == len(everybody) == len(league.BUILT_IN) + len(league.RULES)


def test_recall_alone_measures_no_perplexity(
    data: Path, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import league

    monkeypatch.setattr(league, "TURNS", league.turns.Settings(turns=(0, 2), tokens_per_turn=20, conversations=2))
    out = tmp_path / "league.jsonl"
    options = ["--data", str(data), "--model", model, "--length", "64", "--chunks", "1", "--out", str(out)]
    run(
        league,
        monkeypatch,
        *options,
        "--capacity",
        "16",
        "--tasks",
        "turns",
        "--recall",
        "--players",
        "lagged",
        "fade:16,",
    )
    results = read_records(out)
    assert {one.task for one in results} == {"league-turns"}
    assert {one.policy for one in results} == {"lagged-head+4:16,last=1/2", "fade:16,gain=value_norm", "full"}


def test_chunks_begin_with_bos_where_there_is_one(data: Path, model: str) -> None:
    import league

    tokenizer = AutoTokenizer.from_pretrained(model)
    options = argparse.Namespace(length=64, chunks=2)
    books = sorted((data / "pg19").glob("*.txt"))
    plain = league.chunks(tokenizer, books, options)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    after_bos = league.chunks(tokenizer, books, options)
    for name, rows in after_bos.items():
        assert rows.shape == plain[name].shape == (2, 64)
        assert rows[:, 0].tolist() == [1, 1]
        assert torch.equal(rows[0, 1:], plain[name][0, :63])


@torch.no_grad()
def test_the_loop_without_a_residual_is_fade(llama: Any) -> None:
    import residual

    model = llama().double()
    ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    plain = residual.loop_nll(model, ids, residual.Loop(8))
    torch.testing.assert_close(plain.float(), token_nll(model, ids, "fade:8"), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(plain, residual.loop_nll(model, ids, residual.Loop(8, decay=0.9)))


@pytest.mark.parametrize("by_number", [False, True])
def test_the_residual_is_a_decaying_mean_of_what_left(by_number: bool) -> None:
    """Three slots, of which one is the residual; with equal weights the older of two free tokens has more attention."""
    import residual

    rows = torch.arange(1.0, 6.0).view(1, 1, 5, 1)
    state = residual._State(residual.Loop(3, 0.5, by_number), rows, rows)
    outputs = [
        state.step(torch.zeros(1, 1, 1, 1), rows[:, :, t], rows[:, :, t], t, 1.0).item() for t in range(rows.shape[2])
    ]
    assert outputs[:3] == pytest.approx([1, 1.5, 2])
    assert outputs[3] == pytest.approx((1 + 2 + 3 + 4) / 4)  # 2 left, and is the whole residual
    mean = (0.5 * 2 + 3) / 1.5
    weight = 1.5 if by_number else 1
    assert outputs[4] == pytest.approx((1 + weight * mean + 4 + 5) / (3 + weight))


def test_fade_and_blend_in_the_same_bytes(
    data: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import blend

    out = tmp_path / "blend.jsonl"
    options = ["--data", str(data), "--model", model, "--chunks", "1", "--half", "reporting", "--out", str(out)]
    run(blend, monkeypatch, *options, "--length", "64", "--slots", "16")
    run(blend, monkeypatch, *options, "--length", "48", "--slots", "16")
    results = read_records(out)
    names = [one.policy.partition(":")[0] for one in results]
    assert names == ["full", "fade", "blend", "fade", "blend"] * 2
    sizes = [parse_policy(one.policy).capacity for one in results[1:3]]
    assert sizes[0] > sizes[1], "the residual takes its bytes from the slots"
    assert capsys.readouterr().out.count("of its gap") == 4


@pytest.mark.slow
def test_far_texts(
    data: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import far

    monkeypatch.setattr(far, "BIN", 100)
    monkeypatch.setattr(far, "OLD", 256)
    monkeypatch.setattr(far, "EDGES", (0, 400))
    out = tmp_path / "far.jsonl"
    options = ["--data", str(data), "--model", model, "--length", "1100", "--piece", "64", "--out", str(out)]
    run(far, monkeypatch, *options, "--policy", "window+4:32", "--policy", "fade:32")
    output = capsys.readouterr().out
    assert "fade:32" in output
    assert "minus window+4:32" in output
    old = {one.policy: one.settings["old"] for one in read_records(out)}
    assert set(old["window+4:32"].values()) == {0.0}, "a window holds nothing old but the first four"
    assert max(old["fade:32"].values()) > 0
