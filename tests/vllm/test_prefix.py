"""State files that a server's requests start from: built by the command, checked before they are used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import msrnn
from msrnn.cli import main
from msrnn.core.heads import parts_of
from msrnn.hf import load as models
from msrnn.hf.identity import weights_digest
from msrnn.plan import parse_layer_policy
from msrnn.policy import parse_policy
from msrnn.state_file import StateError
from msrnn.vllm.plugin import Refused
from msrnn.vllm.prefix import Prefix, read_prefixes

TEXT = "You answer in one sentence. You never guess.\n" * 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with the bundled one's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(models.bundled())
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def build(tiny: str, folder: Path, policy: str) -> Path:
    (folder / "text.txt").write_text(TEXT)
    path = folder / "system.state"
    options = ["--policy", policy, "--dtype", "float32", "--device", "cpu", "-q", "-o", str(path)]
    assert main(["state", "build", tiny, "--text", str(folder / "text.txt"), *options]) == 0
    return path


@pytest.fixture(scope="module")
def state_file(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tiny, tmp_path_factory.mktemp("state"), "h2o:8")


@pytest.mark.parametrize("policy", ["h2o:8", "h2o:8,kv=int8", "blend:8,kv=k8v4"])
def test_the_file_is_the_state_after_the_text(tiny: str, tmp_path: Path, policy: str) -> None:
    path = build(tiny, tmp_path, policy)
    prefix = Prefix.read("system", path)
    model, tokenizer = models.load(tiny, dtype="float32")
    ids = tokenizer(TEXT)["input_ids"]
    assert list(prefix.tokens) == ids
    rnn = msrnn.RNN(model, policy)
    _, state = rnn.read(ids, rnn.start())
    for index, slots in enumerate(state.layers):
        assert ("scales" in slots.tensors()) == ("kv=" in policy)
        for name, tensor in slots.tensors().items():
            assert torch.equal(prefix.tensors[f"{index}.{name}"], tensor), name
    again = rnn.load(path)
    assert again.seen == [len(ids)]
    prefix.check(tiny, None, torch.float32, [policy])
    prefix.check(tiny, None, torch.float32, [policy, policy])


def test_kv_heads_with_budgets_have_slots_each(tiny: str, tmp_path: Path) -> None:
    model, _ = models.load(tiny, dtype="float32")
    rnn = msrnn.RNN(model, [parse_policy("tova:8"), parse_layer_policy("fade:4,kv=int8|fade:12")])
    _, state = rnn.read(list(range(20)), rnn.start())
    state.save(tmp_path / "heads.state", tokens=list(range(20)), notes={"weights": weights_digest(tiny)})
    prefix = Prefix.read("heads", tmp_path / "heads.state")
    assert [list(prefix.numbers(layer)) for layer in range(2)] == [[0], [1, 2]]
    for layer, slots in enumerate(state.layers):
        for number, part in zip(prefix.numbers(layer), parts_of(slots), strict=True):
            for name, tensor in part.tensors().items():
                assert torch.equal(prefix.tensors[f"{number}.{name}"], tensor), name
    prefix.check(tiny, None, torch.float32, ["tova:8", "fade:4,kv=int8|fade:12"])


def test_a_system_message_is_read_as_the_template_writes_it(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "s.state"
    options = ["--policy", "tova:8", "--device", "cpu", "-q", "--system", "-o", str(path)]
    assert main(["state", "build", tiny, "--text", str(tmp_path / "text.txt"), *options]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    messages = [{"role": "system", "content": TEXT.strip()}, {"role": "user", "content": "Who?"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    prefix = Prefix.read("s", path)
    assert prefix.matches(whole)
    assert len(whole) - len(prefix.tokens) < 15, "little more than the question is left to read"


def test_only_prompts_that_begin_with_it_and_go_on(state_file: Path) -> None:
    prefix = Prefix.read("system", state_file)
    tokens = list(prefix.tokens)
    assert prefix.matches([*tokens, 5])
    assert not prefix.matches(tokens), "the last token must be computed, to know what follows it"
    assert not prefix.matches([tokens[0] + 1, *tokens[1:], 5])
    assert not prefix.matches(tokens[:3])


AGAIN = "; build it again for this server$"


@pytest.mark.parametrize(
    "dtype, policies, reason",
    [
        (
            torch.bfloat16,
            ["h2o:8"],
            "dtype torch.float32, not torch.bfloat16; serve with --dtype float32, or build it with --dtype bfloat16$",
        ),
        (torch.float32, ["h2o:8,kv=int8"], f"layer 0's policy h2o:8, not h2o:8,kv=int8{AGAIN}"),
        (torch.float32, ["h2o:9"], f"layer 0's policy h2o:8, not h2o:9{AGAIN}"),
        (torch.float32, ["h2o:8", "h2o:9"], f"layer 1's policy h2o:8, not h2o:9{AGAIN}"),
        (torch.float32, ["h2o:8", "h2o:4|h2o:12"], rf"layer 1's policy h2o:8, not h2o:4\|h2o:12{AGAIN}"),
        (torch.float32, ["h2o:8"] * 3, f"number of layers 2, not 3{AGAIN}"),
    ],
)
def test_another_dtype_or_policy_is_refused(
    tiny: str, state_file: Path, dtype: torch.dtype, policies: list[str], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        Prefix.read("system", state_file).check(tiny, None, dtype, policies)


def test_other_weights_are_refused(tiny: str, state_file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(tiny) / "config.json").read_text())
    weights = bytearray((Path(tiny) / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(Refused, match="other weights"):
        Prefix.read("system", state_file).check(str(tmp_path), None, torch.float32, ["h2o:8"])


def test_a_state_without_its_tokens_is_refused(tiny: str, tmp_path: Path) -> None:
    model, _ = models.load(tiny, dtype="float32")
    rnn = msrnn.RNN(model, "tova:8")
    _, state = rnn.read([1, 2, 3], rnn.start())
    state.save(tmp_path / "plain.state")
    with pytest.raises(Refused, match="does not say what was read; make it with `msrnn state build`"):
        Prefix.read("plain", tmp_path / "plain.state")
    with pytest.raises(StateError, match=r"2 tokens were given for a state that has read \[3\]"):
        state.save(tmp_path / "other.state", tokens=[1, 2])
    with pytest.raises(StateError, match="is not a file"):
        read_prefixes((("none", str(tmp_path / "none.state")),))


@pytest.mark.parametrize(
    "text, options, reason",
    [
        (None, [], "text.txt: there is no such file; check the name"),
        (b"\xff", [], "text.txt is not UTF-8 text: "),
        (" \n", [], "is empty"),
        ("some", ["--policy", "full"], "'full' is not bounded"),
    ],
)
def test_bad_input_is_one_line(
    tiny: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | bytes | None,
    options: list[str],
    reason: str,
) -> None:
    if text is not None:
        (tmp_path / "text.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    command = ["state", "build", tiny, "--text", str(tmp_path / "text.txt"), "-q", "--device", "cpu"]
    assert main([*command, "-o", str(tmp_path / "out.state"), *options]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out.state").exists()


def test_weights_are_told_apart_by_their_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({}))
    (tmp_path / "one" / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(models.ModelError, match="no weights"):
        weights_digest(tmp_path / "two")
    (tmp_path / "two" / "model.safetensors").write_bytes(b"abc")
    assert weights_digest(tmp_path / "one") == weights_digest(tmp_path / "two")
