"""A state file whose author recomputed the checksum: refused in one line, before a kernel sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import transformers as hf
from torch import Tensor

import msrnn
from msrnn.core.checks import LONGEST
from msrnn.state_file import _digest, read_state_file
from msrnn.system.files import load_tensors, save_tensors
from msrnn.vllm.prefix import Prefix
from tests.support.models import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
Tensors = dict[str, Tensor]
IDS = torch.randint(3, 64, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> hf.LlamaForCausalLM:
    return tiny_llama()


def saved(model: hf.LlamaForCausalLM, policy: str, path: Path, length: int = 40) -> tuple[msrnn.RNN, Path]:
    rnn = msrnn.RNN(model, policy)
    _, state = rnn.read(IDS[0, :length].tolist(), rnn.start())
    state.save(path, tokens=IDS[0, :length].tolist(), notes={"weights": "of no model"})
    return rnn, path


def altered(path: Path, change: Callable[[Tensors], None], about: dict[str, str | None] | None = None) -> Path:
    """The file with other contents, and a checksum that matches them."""
    notes, tensors = load_tensors(path)
    change(tensors)
    notes = {name: text for name, text in (notes | (about or {})).items() if text is not None and name != "digest"}
    save_tensors(path, tensors, notes | {"digest": _digest(notes, tensors)})
    return path


def set_to(name: str, value: object) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[name].fill_(value)  # type: ignore[arg-type]


def shift(by: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("positions"):
                tensors[name] += by * (tensors[name] >= 0)

    return change


def put(name: str, at: tuple[int, ...], value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][at] = value

    return change


def replace(name: str, make: Callable[[Tensor], Tensor | None]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        new = make(tensors.pop(name))
        if new is not None:
            tensors[name] = new.contiguous()

    return change


def swap(one: str, other: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def duplicate(tensors: Tensors) -> None:
    held = tensors["0.positions"][0, 0]
    real = (held >= 0).nonzero().flatten()
    held[real[0]] = held[real[1]]


def drop_protected(tensors: Tensors) -> None:
    """The newest token, which h2o may not evict, gives way to one that had left."""
    held = tensors["0.positions"][0, 0]
    gone = next(p for p in range(40) if p not in held.tolist())
    held[held == 39] = gone


def one_less(tensors: Tensors) -> None:
    held = tensors["0.positions"][0, 0]
    held[held.argmax()] = -1
    tensors["0.next"][0, 0] = int((held < 0).to(torch.uint8).argmax())


def one_more(tensors: Tensors) -> None:
    held = tensors["0.positions"][0, 0]
    gone = next(p for p in range(40) if p not in held.tolist())
    held[held < 0] = gone


def longer(tensors: Tensors) -> None:
    for name in ("0.keys", "0.values", "0.positions", "0.scores"):
        tensors[name] = torch.cat([tensors[name]] * 2, 2)


HOSTILE = {
    "positions 1,000 on": (shift(1000), "positions run"),
    "positions 1,000,000 on": (shift(1_000_000), "positions run"),
    "positions past 32 bits": (shift(2**40), "positions run"),
    "positions before the text": (shift(-50), "positions run"),
    "one position twice": (duplicate, "twice"),
    "a protected token missing": (drop_protected, "protects"),
    "fewer tokens than fit": (one_less, "room for more"),
    "11 tokens of 10": (one_more, "holds 11 tokens, more than the capacity of 10"),
    "a full slot comes next": (lambda t: t["0.next"].copy_((t["0.positions"] >= 0).long().argmax(-1)), "next slot"),
    "a slot before all": (set_to("0.next", -7), "next slot"),
    "a slot far behind all": (set_to("0.next", 10**9), "next slot"),
    "more tokens than the text has": (set_to("0.seen", 10**6), "tokens were read of 40"),
    "less than no token": (set_to("0.seen", -1), "tokens were read"),
    "layers that read different texts": (set_to("1.seen", 41), "tokens were read of 40"),
    "NaN scores": (put("0.scores", (0, 0, 2), float("nan")), "scores hold numbers that are not finite"),
    "infinite scores": (put("1.scores", (0, 1, 2), float("inf")), "scores hold numbers that are not finite"),
    "scores below 0": (put("0.scores", (0, 0, 2), -1.0), "below 0"),
    "NaN keys": (put("2.keys", (0, 0, 1, 3), float("nan")), "keys hold numbers that are not finite"),
    "NaN values": (put("2.values", (0, 0, 1, 3), float("nan")), "values hold numbers that are not finite"),
    "twice the slots": (longer, "22 slots"),
    "keys in float64": (replace("0.keys", Tensor.double), "do not belong to keys"),
    "all in float64": (lambda t: t.update({n: x.double() for n, x in t.items() if x.is_floating_point()}), "float64"),
    "keys as integers": (replace("0.keys", Tensor.long), "keys are int64, not"),
    "positions in 32 bits": (replace("0.positions", Tensor.int), "positions are int32"),
    "keys without slots": (replace("0.keys", lambda x: x[:, :, :0]), "shape"),
    "keys in two dimensions": (replace("0.keys", lambda x: x.flatten(1)), "shape"),
    "a number for keys": (replace("0.keys", lambda x: x.sum()), "shape"),
    "keys of another size": (
        lambda t: t.update({n: x[..., :4].contiguous() for n, x in t.items() if "keys" in n}),
        "the model",
    ),
    "one head less": (
        lambda t: t.update({n: x[:, :1].contiguous() for n, x in t.items() if x.ndim > 1 and n != "counts"}),
        "the model",
    ),
    "keys and values of other sizes": (replace("0.values", lambda x: x[:, :, :5]), "do not belong to keys"),
    "no scores": (replace("0.scores", lambda x: None), "has scores"),
    "no positions": (replace("0.positions", lambda x: None), "has no positions"),
    "no counts": (replace("counts", lambda x: None), "has no counts"),
    "gains without a policy": (lambda t: t.update({"0.gains": torch.ones(1, 2, 11)}), "no gains"),
    "an unknown tensor": (lambda t: t.update({"7.keys": torch.ones(2)}), "7.keys"),
    "no limit": (put("counts", (0, 0), -1), "slots"),
    "another limit": (put("counts", (0, 0), 10**6), "slots"),
    "an enormous count": (lambda t: t["counts"][:, 1].fill_(2**62), "columns were fed"),
    "a count past what kernels count": (lambda t: t["counts"][:, 1].fill_(LONGEST + 1), "columns were fed"),
    "nothing fed": (lambda t: t["counts"][:, 1].fill_(0), "columns were fed"),
    "a layer fed less": (lambda t: (t["counts"][1, 1].fill_(50), None)[1], "the same number of tokens"),
    "counts of one layer": (replace("counts", lambda x: x[:1]), "counts"),
    "counts as fractions": (replace("counts", Tensor.double), "counts"),
    "tokens below 0": (put("tokens", (3,), -5), "its tokens"),
    "fewer tokens": (replace("tokens", lambda x: x[:7]), "its tokens"),
    "scores for keys": (swap("0.scores", "0.keys"), "shape"),
    "positions for scores": (swap("0.scores", "0.positions"), "int64"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(model: hf.LlamaForCausalLM, tmp_path: Path, case: str) -> None:
    """By `load` and, but for the model's own shape, by the server's prefixes."""
    change, reason = HOSTILE[case]
    rnn, path = saved(model, "h2o:10", tmp_path / "state")
    before = rnn.load(path)
    altered(path, change)
    with pytest.raises(msrnn.StateError, match=reason) as error:
        rnn.load(path)
    assert "\n" not in str(error.value)
    if reason != "the model" and case != "all in float64":
        with pytest.raises(msrnn.StateError, match=reason):
            Prefix.read("hostile", path)
    assert before.held == 10


@pytest.mark.parametrize(
    "change, reason",
    [
        (put("0.residual", (0, 0, -1), -1.0), "the residual holds fewer than 0 tokens"),
        (put("1.residual", (0, 1, 3), float("nan")), "numbers that are not finite"),
        (replace("0.residual", lambda x: x[..., :-1]), "not float32"),
        (replace("0.residual", lambda x: None), "residual"),
    ],
)
def test_a_hostile_residual_is_refused(
    model: hf.LlamaForCausalLM, tmp_path: Path, change: Callable[[Tensors], None], reason: str
) -> None:
    rnn, path = saved(model, "blend:10", tmp_path / "state")
    altered(path, change)
    with pytest.raises(msrnn.StateError, match=reason) as error:
        rnn.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", ["fade:10,kv=int8", "blend:10,kv=int8"])
def test_sums_beside_codes_are_in_the_precision_of_the_model(
    model: hf.LlamaForCausalLM, tmp_path: Path, policy: str
) -> None:
    rnn, path = saved(model, policy, tmp_path / "state")
    altered(
        path, lambda t: t.update({n: x.double() for n, x in t.items() if n.endswith(("scores", "residual", "gains"))})
    )
    with pytest.raises(msrnn.StateError, match=r"layer 0 is torch.float64, not torch.float32"):
        rnn.load(path)


@pytest.mark.parametrize(
    "about",
    [
        *({name: None} for name in ("policy", "model", "dtype", "prompt mode")),
        *({"policy": text} for text in ("[1, 2]", "[", "[" * 5000, '["tova:8"]', '["no such policy"]', "x" * 100_000)),
        {"policy": json.dumps(["h2o:" + "9" * 5000] * 3)},
        {"kind": "msrnn state 1"},
    ],
)
def test_hostile_metadata_is_refused(model: hf.LlamaForCausalLM, tmp_path: Path, about: dict) -> None:
    rnn, path = saved(model, "h2o:10", tmp_path / "state")
    altered(path, lambda tensors: None, about)
    for load in (rnn.load, read_state_file):
        with pytest.raises(msrnn.StateError) as error:
            load(path)
        assert len(str(error.value)) < 1000


BAD_WINDOWS = ("[null, null]", "[0, 9, 9]", "[9, 9, true]", '["9", 9, 9]', "9", "[", "[" * 5000, "x" * 100_000)


@pytest.mark.parametrize("windows", BAD_WINDOWS, ids=range(len(BAD_WINDOWS)))
def test_hostile_windows_are_refused(model: hf.LlamaForCausalLM, tmp_path: Path, windows: str) -> None:
    _, path = saved(model, "h2o:10", tmp_path / "state")
    altered(path, lambda tensors: None, {"windows": windows})
    with pytest.raises(msrnn.StateError, match="no valid windows") as error:
        read_state_file(path)
    assert len(str(error.value)) < 1000


def test_files_without_windows_are_of_models_without_any(model: hf.LlamaForCausalLM, tmp_path: Path) -> None:
    _, path = saved(model, "h2o:10", tmp_path / "state")
    altered(path, lambda tensors: None, {"windows": None})
    about, _ = read_state_file(path)
    assert "windows" not in about


def test_first_tokens_are_protected(model: hf.LlamaForCausalLM, tmp_path: Path) -> None:
    rnn, path = saved(model, "tova+4:10", tmp_path / "state")
    rnn.load(path)

    def change(tensors: Tensors) -> None:
        held = tensors["1.positions"][0, 0]
        held[held == 2] = next(p for p in range(40) if p not in held.tolist())

    altered(path, change)
    with pytest.raises(msrnn.StateError, match="protects, the first 4"):
        rnn.load(path)


@pytest.mark.parametrize("how", ["shape", "shape and offsets", "many small ones", "header"])
def test_declared_sizes_are_compared_with_the_file(model: hf.LlamaForCausalLM, tmp_path: Path, how: str) -> None:
    """Before anything is allocated: a file of 30 KB that declares terabytes takes no memory."""
    rnn, path = saved(model, "h2o:10", tmp_path / "state")
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    if how.startswith("shape"):
        header["0.keys"]["shape"][2] = 2**36
    if how == "shape and offsets":
        header["0.keys"]["data_offsets"][1] = header["0.keys"]["data_offsets"][0] + 2**36 * 2 * 8 * 4
    if how == "many small ones":  # all of them on the same bytes
        header |= {f"{n}.keys": header["0.keys"] for n in range(100, 3000)}
    text = json.dumps(header).encode()
    declared = 2**40 if how == "header" else len(text)
    path.write_bytes(declared.to_bytes(8, "little") + text + rest)
    before = psutil.Process().memory_info().rss
    for load in (rnn.load, read_state_file):
        with pytest.raises(msrnn.StateError, match="cut short or is not a state file"):
            load(path)
    assert psutil.Process().memory_info().rss - before < 32 << 20


SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None, "head_dim": 8}
FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, sliding_window=9)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SHAPE, sliding_window=14)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SHAPE, sliding_window=9)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SHAPE, num_local_experts=2, sliding_window=9,
                                                            num_experts_per_tok=1)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SHAPE)),
}  # fmt: skip
POLICIES = ("tova:10", "h2o:10", "tova-head+2:10", "tova-query-head:6", "window+3:10", "tova:10,gain=value_norm",
            "fade:10", "full", "tova+1:10,last=3", "tova:1", "h2o+2:64", "window:64", "blend:10")  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_a_model_makes_is_taken_back(family: str, tmp_path: Path) -> None:
    """No check is too strict: every policy, prompt mode and length, with padding, over several kinds of models."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    for number, policy in enumerate(POLICIES[:-1] if family == "gemma2" else POLICIES):  # soft caps take no residual
        rnn = msrnn.RNN(model, policy, prompt="oneshot" if number % 3 == 2 else "recurrent", chunk=5)
        for length in (1, 10, 40) if number % 2 else (3, 11):
            mask = torch.ones(2, length, dtype=torch.long)
            mask[1, : length // 2] = 0  # padding on the left, all of it where there is one token
            ids = IDS[:, :length].repeat(2, 1)
            _, state = rnn.step(ids, rnn.start(), None if length % 2 else mask)
            state.save(tmp_path / "state")
            read_state_file(tmp_path / "state")
            want, state = rnn.step(ids[:, :1], state)
            got, again = rnn.step(ids[:, :1], rnn.load(tmp_path / "state"))
            assert torch.equal(want, got)
            state.save(tmp_path / "state")
            again.save(tmp_path / "state")
