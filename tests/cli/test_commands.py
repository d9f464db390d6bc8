"""What `msrnn generate`, `chat`, `trace` and `info` do, end to end: the bundled model and a tiny one."""

from __future__ import annotations

import io
import json
import os
import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import msrnn
from msrnn.hf import load as models
from msrnn.hf.cost import cost
from msrnn.hf.geometry import geometry
from tests.support.commands import STORY, assert_refused, call, msrnn_command, stdout_of


def type_in(monkeypatch, raw: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), "utf-8"))


# generate


@pytest.mark.slow
def test_generate_from_a_file_longer_than_the_state(story):
    options = ("--policy", "tova:32", "--max-new-tokens", "6", "--json")
    process = msrnn_command("generate", "-f", story, *options)
    facts = json.loads(stdout_of(process))
    model, tokenizer = msrnn.load()
    ids = tokenizer(STORY * 6, return_tensors="pt")
    assert facts["tokens_read"] == ids.input_ids.shape[1] > 3 * 32
    assert facts["held"] == facts["capacity"] == 32
    assert facts["tokens_generated"] == 6
    expected = model.generate(**ids, past_key_values=msrnn.cache(model, "tova:32"), max_new_tokens=6, do_sample=False)
    assert facts["text"] == tokenizer.decode(expected[0, -6:])
    predicted = cost(geometry(model), msrnn.Plan.of("tova:32", 30), model.dtype, facts["tokens_read"] + 6)
    assert (facts["state_bytes"], facts["full_bytes"]) == (predicted.state, predicted.full)
    assert facts["peak_bytes"] > 0
    opening = "msrnn: tova:32 on SmolLM2-135M-Instruct (float32"
    first = next(
        line for line in process.stderr.splitlines() if line.startswith(opening)
    )  # a new machine fetches before
    assert "per sequence; full cache" in first


def test_generate_from_standard_input_as_it_is_written(capsys, monkeypatch):
    type_in(monkeypatch, b"The capital of France is")
    code, out, err = call(capsys, "generate", "--stream", "--max-new-tokens", "4")
    assert code == 0
    assert out.strip().startswith("Paris")
    assert err.count("msrnn: ") == 2


def test_generate_in_every_way(capsys, story, tiny):
    """One small model, all the options: what they say is what they do."""

    def text(*options: str) -> str:
        code, out, err = call(capsys, "generate", "-f", story, "--model", tiny, "--max-new-tokens", "5", *options)
        assert code == 0, err
        return out

    plain = text("--policy", "tova:16")
    assert plain == text("--policy", "tova:16", "--temperature", "0", "--seed", "3", "--stream")
    sampled = ("--policy", "tova:16", "--temperature", "3", "--top-k", "400", "--top-p", "0.99")
    assert text(*sampled, "--seed", "1") == text(*sampled, "--seed", "1") != text(*sampled, "--seed", "2")
    for option in (("--num-beams", "3"), ("--prompt-mode", "oneshot"), ("--repetition-penalty", "1.5")):
        facts = json.loads(text("--policy", "tova:16", "--json", *option))
        assert facts["held"] <= 16
    assert json.loads(text("--policy", "tova:1/8", "--length", "80", "--json"))["capacity"] == 10
    assert json.loads(text("--policy", "full", "--json"))["capacity"] is None
    assert json.loads(text("--policy", "tova:20MiB", "--dtype", "bfloat16", "--json"))["capacity"] > 1000


def test_generate_by_the_engine(capsys, story, tiny):
    """The way of a GPU, without its graphs: the same text and the same facts as transformers' generate gives."""

    def facts(*options: str) -> dict[str, Any]:
        common = ("--model", tiny, "--policy", "tova:16", "--max-new-tokens", "9", "--json", "-q")
        code, out, err = call(capsys, "generate", "-f", story, *common, *options)
        assert (code, err) == (0, "")
        return json.loads(out)

    untimed = ("seconds", "read_seconds", "tokens_per_second", "peak_bytes")
    for options in ((), ("--policy", "full"), ("--policy", "window+2:24"), ("--max-new-tokens", "1")):
        plain, engine = ({k: v for k, v in facts(*options, "--engine", how).items() if k not in untimed}
                         for how in ("off", "on"))  # fmt: skip
        assert engine == plain
    sampled = ("--engine", "on", "--temperature", "3", "--top-k", "400", "--top-p", "0.99")
    one, again, other = (facts(*sampled, "--seed", seed)["text"] for seed in ("1", "1", "2"))
    assert one == again != other
    assert facts(*sampled)["text"] != facts(*sampled)["text"]  # without a seed, another each time
    narrow = ("--engine", "on", "--temperature", "3", "--top-k", "1")
    assert facts(*narrow)["text"] == facts()["text"]


def test_generate_by_the_engine_as_it_is_written(capsys, story, tiny):
    common = ("generate", "-f", story, "--model", tiny, "--policy", "tova:16", "--max-new-tokens", "9")
    code, whole, _ = call(capsys, *common, "-q")
    assert code == 0
    code, streamed, notes = call(capsys, *common, "--engine", "on", "--stream")
    assert (code, streamed) == (0, whole)
    assert "wrote 9 in" in notes
    assert "16 held" in notes


@pytest.mark.parametrize(
    "option", [("--num-beams", "2"), ("--repetition-penalty", "1.2"), ("--prompt-mode", "oneshot")]
)
def test_what_only_transformers_does_is_not_asked_of_the_engine(capsys, tiny, option):
    code, _, err = call(capsys, "generate", "a b", "--model", tiny, "--engine", "on", *option)
    assert code == 2
    assert f"msrnn's engine has no {option[0]}" in err


def test_generate_with_a_profile(capsys, story, tiny, tmp_path):
    (tmp_path / "profile.json").write_text(json.dumps({"capacities": [4, 36, 8]}))
    options = ("--model", tiny, "--max-new-tokens", "2", "--json", "--profile", str(tmp_path / "profile.json"))
    for policy in ((), ("--policy", "tova:16")):
        code, out, err = call(capsys, "generate", "-f", story, "-q", *policy, *options)
        assert (code, err) == (0, "")
        assert json.loads(out)["capacities"] == [4, 36, 8]
        assert json.loads(out)["held"] == 36
    code, _, err = call(capsys, "generate", "-f", story, "--policy", "tova:99", *options)
    assert (code, err.count("\n")) == (2, 1)
    assert "average" in err


def test_a_question_about_a_file(capsys, story, tokenizer):
    options = ("--question", "Who counted the ships?", "--policy", "tova:64", "--max-new-tokens", "3", "--json")
    code, out, err = call(capsys, "generate", "-f", story, *options)
    assert code == 0, err
    messages = [{"role": "user", "content": STORY * 6 + "\n\nWho counted the ships?"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert json.loads(out)["tokens_read"] == len(expected)


# chat


@pytest.mark.slow
def test_a_chat_goes_on_in_another_process(tmp_path):
    state = str(tmp_path / "ada state")
    options = ("chat", "--policy", "tova:24", "--max-new-tokens", "5")
    first = f"My name is Ada.\n/save {state}\n/state\n/nonsense\n/load {tmp_path}/nothing\n/save /no/such/file\n"
    process = msrnn_command(*options, text=f"{first}What is my name?\n/quit\nnot read\n")
    lines = stdout_of(process).splitlines()
    assert os.listdir(tmp_path) == ["ada state"]
    assert lines[1].startswith("saved ")
    assert lines[2].startswith("tova:24: ")
    assert "24 held" in lines[2]
    for reason in ("unknown command /nonsense", "nothing is not a file", "there is no folder /no/such"):
        assert sum(reason in line for line in process.stderr.splitlines()) == 1
    again = msrnn_command(*options, "-q", text=f"/load {state}\nWhat is my name?\n/reset\n/state")
    loaded, answer, *rest = stdout_of(again).splitlines()
    assert again.stderr == ""
    assert loaded.startswith("loaded ")
    assert answer == lines[3]
    assert rest == ["forgotten", "tova:24: 0 tokens read, 0 held in 0 B; a full cache would take 0 B"]


def test_chat_reads_every_token_once(capsys, monkeypatch, tokenizer):
    """The state has read the template of the whole conversation, but for the end of the last answer."""
    type_in(monkeypatch, b"Say yes.\n \xff\n\n Why?\n/state\n")
    code, out, err = call(capsys, "chat", "--policy", "full", "--max-new-tokens", "4", "--system", "Be brief.")
    assert code == 0
    assert "error: that line is not UTF-8" in err
    first, second, state = out.strip().splitlines()
    roles = ("system", "user", "assistant", "user")
    contents = ("Be brief.", "Say yes.", first, "Why?")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + second
    assert state.startswith(f"full: {len(tokenizer(text)['input_ids'])} tokens read")


def test_chat_without_a_template_is_refused(capsys, tiny):
    for command in (("chat",), ("generate", "x", "--chat")):
        assert_refused(*call(capsys, *command, "-q", "--model", tiny), "has no chat template; use an instruct model")


# trace and info


@pytest.mark.parametrize("policy", ["tova:16", "tova:16,kv=k8v4"])
def test_trace_says_what_the_states_held(capsys, story, tmp_path, policy):
    file = tmp_path / "trace.safetensors"
    options = ("--policy", policy, "--max-tokens", "60", "-o", str(file), "--json")
    code, out, err = call(capsys, "trace", "-f", story, *options)
    assert code == 0, err
    facts, trace = json.loads(out), msrnn.Trace.load(file)
    model, tokenizer = msrnn.load()
    ids = torch.tensor(tokenizer(STORY * 6)["input_ids"][:60])
    assert torch.equal(trace.tokens[0], ids)
    assert (facts["tokens"], facts["policy"], trace.length) == (60, policy, 60)
    _, state = msrnn.RNN(model, policy).read(ids, msrnn.RNN(model, policy).start())
    for index, (layer, row) in enumerate(zip(state.layers, facts["layers"], strict=True)):
        kept = sorted(p for p in layer.positions[0, 0].tolist() if p >= 0)
        assert trace.held(index, 59)[0, 0].nonzero().flatten().tolist() == kept
        assert row == {
            "layer": index,
            "held": 16,
            "held_by_unit": [16],
            "recent": round(sum(p >= 30 for p in kept) / 16, 4),
            "first": float(0 in kept),
            "oldest": kept[0],
        }


@pytest.mark.parametrize("policy", ["tova-head:8", "full"])
def test_trace_as_a_table(capsys, story, tiny, tmp_path, policy):
    options = ("--model", tiny, "--policy", policy, "--max-tokens", "40", "-o", str(tmp_path / "trace"))
    code, out, err = call(capsys, "trace", "-f", story, *options)
    assert code == 0
    assert out.startswith("layer  held  recent  first token  oldest kept\n    0")
    assert "trace of 40 tokens" in err


def test_info_tells_the_cost(capsys, tiny):
    config = AutoConfig.from_pretrained(models.bundled())
    code, out, err = call(capsys, "info", "tova:1/16", "--length", "4096", "--memory", "16GiB", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    predicted = cost(geometry(config), msrnn.Plan.of("tova:256", 30), torch.float32, 4096)
    assert (facts["state_bytes"], facts["full_bytes"]) == (predicted.state, predicted.full)
    assert facts["weight_bytes"] == 134515008 * 4
    assert (facts["batch"], facts["full_batch"]) == predicted.largest_batch(2**34 - facts["weight_bytes"])
    assert facts["slots"] == [257] * 30
    code, out, _ = call(capsys, "info", tiny, "h2o:64", "--dtype", "bfloat16", "--memory", "1GiB")
    assert code == 0
    assert "65 x 3" in out
    assert "with a full cache, in 1.0 GiB" in out


def test_info_says_what_best_stands_for(capsys, tiny):
    code, out, err = call(capsys, "info", "best:512", "--dtype", "bfloat16", "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    best = facts["resolved"]
    assert (facts["asked"], best["kv"]) == ("best:512", "int8")
    assert best["profile"] == "SmolLM2-135M-Instruct-heads"
    assert best["policy"] == f"fade:{best['slots']},kv=int8,profile={best['profile']}"
    plain = cost(
        geometry(AutoConfig.from_pretrained(models.bundled())), msrnn.Plan.of("tova:512", 30), torch.bfloat16, 1
    )
    assert facts["state_bytes"] <= best["limit_bytes"] == plain.state
    assert float(torch.tensor(facts["slots"]).double().mean()) == best["slots"] + 1
    code, out, _ = call(capsys, "info", tiny, "best:16,kv=k8v4")
    assert code == 0
    assert re.search(r"best:16,kv=k8v4 +fade:\d+,kv=k8v4\n", out)
    assert "none that msrnn comes with was made for this model" in out


def test_info_knows_a_models_own_windows(capsys, tmp_path):
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = {"model_type": "gemma2", "num_hidden_layers": 3, "sliding_window": 128, "layer_types": layers}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"hidden_size": 64, "vocab_size": 100}))
    code, out, err = call(capsys, "info", str(tmp_path), "tova:512", "--json")
    assert code == 0, err
    assert json.loads(out)["slots"] == [128, 513, 128]
    assert json.loads(out)["windows"] == [128, None, 128]
