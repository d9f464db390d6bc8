"""The RNN: stepping, forking, saving; a state file that does not fit is refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import msrnn
from msrnn.rnn import pieces
from msrnn.system.files import atomic_write

POLICIES = [
    *("tova:16", "h2o:16", "window+4:16", "tova-head:16", "full", "tova:16,momentum=0.5"),
    *("tova:16,kv=int8", "h2o:16,kv=k8v4", "full,kv=int8", "blend:16", "blend:16,kv=int8"),
]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 97} | changes
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    return LlamaForCausalLM(config).eval().to(dtype)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny()


def ids(length: int, seed: int = 1, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_of_any_size_agree(model: LlamaForCausalLM, policy: str) -> None:
    if "kv=" in policy:  # a rounding in float32 may change a code
        model = tiny().double()
    rnn, text = msrnn.RNN(model, policy), ids(70)
    once, state = rnn.step(text, rnn.start())
    other = rnn.start()
    for piece in text.split([1, 1, 30, 7, 31], dim=1):
        logits, other = rnn.step(piece, other)
    torch.testing.assert_close(logits, once, atol=1e-4, rtol=1e-4)
    assert state.seen == other.seen == [70]
    assert policy.startswith("full") or state.held == other.held == 16


def test_ragged_rows_padded_on_either_side(model: LlamaForCausalLM) -> None:
    rnn = msrnn.RNN(model, "tova:8")
    texts = [ids(n, seed=n) for n in (5, 40, 23)]
    single = [rnn.step(text, rnn.start()) for text in texts]
    for side in ("left", "right"):
        tokens, mask = torch.zeros(3, 40, dtype=torch.long), torch.zeros(3, 40, dtype=torch.long)
        for row, text in enumerate(texts):
            size = text.shape[1]
            place = slice(40 - size, 40) if side == "left" else slice(0, size)
            tokens[row, place], mask[row, place] = text[0], 1
        logits, state = rnn.step(tokens, rnn.start(), mask)
        after, state = rnn.step(ids(3, seed=9, batch=3), state)
        for row, (want, alone) in enumerate(single):
            torch.testing.assert_close(logits[row], want[0], atol=1e-4, rtol=1e-4)
            next_logits, _ = rnn.step(ids(3, seed=9, batch=3)[row : row + 1], alone.fork())
            torch.testing.assert_close(after[row], next_logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.uint8])
def test_masks_of_any_dtype(device: str, dtype: torch.dtype) -> None:
    """Tokens and mask may be on the CPU, wherever the model is."""
    rnn, mask = msrnn.RNN(tiny().to(device), "tova:8"), torch.tensor([[0] * 5 + [1] * 25, [1] * 30])
    want, state = rnn.step(ids(30, batch=2), rnn.start(), mask)
    got, other = rnn.step(ids(30, batch=2), rnn.start(), mask.to(dtype))
    assert torch.equal(got, want)
    assert state.seen == other.seen == [25, 30]


def test_a_state_is_used_once(model: LlamaForCausalLM) -> None:
    rnn = msrnn.RNN(model, "tova:8")
    _, state = rnn.step(ids(5), rnn.start())
    rnn.step(ids(1), state)
    with pytest.raises(msrnn.StateError, match=r"was used by an earlier step or moved by to\(\).*or fork\(\)"):
        rnn.step(ids(1), state)
    start = rnn.start()
    assert start.to("cpu").held == 0
    with pytest.raises(msrnn.StateError, match=r"moved by to\(\); use the state that call returned"):
        start.fork()


def test_bad_tokens_leave_the_state_usable(model: LlamaForCausalLM) -> None:
    rnn = msrnn.RNN(model, "tova:8")
    _, state = rnn.step(ids(5), rnn.start())
    for bad, reason in (
        (torch.tensor([[97]]), "knows 0 to 96"),
        (torch.tensor([1]), "must be whole numbers"),
        (torch.zeros(1, 0, dtype=torch.long), "T > 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            rnn.step(bad, state)
    with pytest.raises(msrnn.StateError, match="holds 1 sequences, 2"):
        rnn.step(ids(1, batch=2), state)
    rnn.step(ids(1), state)


@pytest.mark.parametrize("policy", POLICIES)
def test_forks_go_their_own_way(model: LlamaForCausalLM, policy: str) -> None:
    rnn = msrnn.RNN(model, policy)
    _, state = rnn.step(ids(30), rnn.start())
    other = state.fork()
    want, _ = rnn.step(ids(9, seed=5), state.fork())
    rnn.step(ids(20, seed=6), state)
    got, _ = rnn.step(ids(9, seed=5), other)
    assert torch.equal(got, want)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [3, 17, 60])
def test_resumed_from_disk_bit_for_bit(model: LlamaForCausalLM, policy: str, length: int, tmp_path: Path) -> None:
    rnn = msrnn.RNN(model, policy)
    _, state = rnn.step(ids(length), rnn.start())
    state.fork().save(tmp_path / "state.safetensors")
    loaded = msrnn.RNN(tiny(), policy).load(tmp_path / "state.safetensors")
    for seed, size in ((2, 1), (3, 11), (4, 1)):
        want, state = rnn.step(ids(size, seed), state)
        got, loaded = rnn.step(ids(size, seed), loaded)
        assert torch.equal(got, want)
    assert all(
        torch.equal(mine, theirs)
        for a, b in zip(state.layers, loaded.layers, strict=True)
        for mine, theirs in zip(a.tensors().values(), b.tensors().values(), strict=True)
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_loaded_tensors_are_as_aligned_as_fresh_ones(model: LlamaForCausalLM, policy: str, tmp_path: Path) -> None:
    """In the file they lie at any address, and a library may pick other instructions there, which round otherwise."""
    rnn, file = msrnn.RNN(model, policy), tmp_path / "state.safetensors"
    _, state = rnn.step(ids(21), rnn.start())
    state.save(file, notes={"odd": "x"})
    with safe_open(file, framework="pt") as raw:
        assert any(raw.get_tensor(name).data_ptr() % 64 for name in raw.keys())  # noqa: SIM118 (not a dict)
    for slots in rnn.load(file).layers:
        assert [name for name, tensor in slots.tensors().items() if tensor.data_ptr() % 64] == []


@pytest.mark.slow
def test_resumed_in_another_process_bit_for_bit(model: LlamaForCausalLM, tmp_path: Path) -> None:
    rnn, file = msrnn.RNN(model, "tova:16"), tmp_path / "state.safetensors"
    _, state = rnn.step(ids(50), rnn.start())
    state.save(file)
    code = (
        f"import sys, json, torch, msrnn; sys.path.insert(0, {str(Path(__file__).parents[1])!r});"
        "from tests import test_rnn as t;"
        f"rnn = msrnn.RNN(t.tiny(), 'tova:16'); logits, _ = rnn.step(t.ids(7, 3), rnn.load({str(file)!r}));"
        "print(json.dumps(logits[0].tolist()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    want, _ = rnn.step(ids(7, 3), state)
    assert json.loads(run.stdout) == want[0].tolist()


def test_size_on_disk_depends_on_the_capacity_only(model: LlamaForCausalLM, tmp_path: Path) -> None:
    sizes = {}
    for policy in ("tova:16", "h2o:16", "tova:32"):
        rnn = msrnn.RNN(model, policy)
        for length in (1, 10, 300):
            _, state = rnn.read(ids(length)[0], rnn.start())
            state.save(tmp_path / "state")
            sizes[policy, length] = (tmp_path / "state").stat().st_size
    for policy in ("tova:16", "h2o:16", "tova:32"):
        assert len({sizes[policy, n] for n in (1, 10, 300)}) == 1
    assert sizes["tova:32", 1] > 1.5 * sizes["tova:16", 1]


def _to_meta(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_to_meta(one) for one in value)
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _put_on_meta(layer: torch.nn.Module) -> None:
    """As accelerate puts a layer on another device: arguments are moved there, and the output back."""
    layer.to("meta").register_forward_pre_hook(
        lambda _, args, options: (_to_meta(args), {name: _to_meta(one) for name, one in options.items()}),
        with_kwargs=True,
    )
    layer.register_forward_hook(lambda _, args, output: torch.zeros(output.shape))


@pytest.mark.parametrize("policy", ["tova:16", "h2o:16,kv=int8"])
def test_a_loaded_state_goes_to_the_devices_of_the_layers(policy: str, tmp_path: Path) -> None:
    """The meta device, which computes nothing, stands for a second GPU."""
    model = tiny()
    rnn = msrnn.RNN(model, policy)
    _, state = rnn.step(ids(30), rnn.start())
    state.save(tmp_path / "state")
    state = rnn.load(tmp_path / "state")
    _put_on_meta(model.model.layers[1])
    _, state = rnn.step(ids(1), state)
    assert [layer.keys.device.type for layer in state.layers] == ["cpu", "meta", "cpu"]
    assert state.seen == [31]


def test_layers_of_unequal_size(model: LlamaForCausalLM, tmp_path: Path) -> None:
    plan = msrnn.per_layer("tova:16", [4, 36, 8])
    rnn = msrnn.RNN(model, plan)
    assert str(rnn.plan) == "tova:avg=16"
    _, state = rnn.read(ids(80)[0], rnn.start(trace=True))
    assert [int(layer.held.max()) for layer in state.layers] == [4, 36, 8]
    assert [int(state.trace.held(i, 79).sum()) for i in range(3)] == [4, 36, 8]
    state.save(tmp_path / "state")
    want, _ = rnn.step(ids(5, 2), state)
    got, _ = rnn.step(ids(5, 2), rnn.load(tmp_path / "state"))
    assert torch.equal(got, want)
    with pytest.raises(msrnn.StateError, match="another policy"):
        msrnn.RNN(model, msrnn.per_layer("tova", [4, 8, 36])).load(tmp_path / "state")


def test_a_file_for_something_else_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    rnn, file = msrnn.RNN(model, "tova:16"), tmp_path / "state"
    with pytest.raises(msrnn.StateError, match="read nothing yet"):
        rnn.start().save(file)
    _, state = rnn.step(ids(30), rnn.start())
    state.save(file)
    for other, reason in (
        (msrnn.RNN(tiny(seed=1), "tova:16"), "another model"),
        (msrnn.RNN(tiny(num_hidden_layers=2), "tova:16"), "another model"),
        (msrnn.RNN(tiny(hidden_size=64), "tova:16"), "another model"),
        (msrnn.RNN(model, "tova:17"), "another policy: tova:16, not tova:17"),
        (msrnn.RNN(model, "tova:16", prompt="oneshot"), "another prompt mode"),
        (msrnn.RNN(tiny(dtype=torch.bfloat16), "tova:16"), "another dtype: torch.float32, not torch.bfloat16"),
    ):
        with pytest.raises(msrnn.StateError, match=reason):
            other.load(file)


def test_a_damaged_file_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    rnn, file, bad = msrnn.RNN(model, "tova:16"), tmp_path / "state", tmp_path / "bad"
    _, state = rnn.step(ids(30), rnn.start())
    state.save(file)
    whole = file.read_bytes()
    for cut in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        bad.write_bytes(whole[:cut])
        with pytest.raises(msrnn.StateError, match="cut short"):
            rnn.load(bad)
    for place in (len(whole) - 5, len(whole) // 2):
        bad.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(msrnn.StateError, match="altered"):
            rnn.load(bad)
    save_file(load_file(file), bad)
    with pytest.raises(msrnn.StateError, match="not a state file"):
        rnn.load(bad)
    with pytest.raises(msrnn.StateError, match="is not a file"):
        rnn.load(tmp_path / "nothing")


def _interrupted_write(file: Path) -> None:
    with atomic_write(file) as part:
        part.write_bytes(b"half of it")
        raise KeyboardInterrupt


def test_a_crash_while_saving_keeps_the_old_state(model: LlamaForCausalLM, tmp_path: Path) -> None:
    rnn, file = msrnn.RNN(model, "tova:16"), tmp_path / "state"
    _, state = rnn.step(ids(30), rnn.start())
    state.save(file)
    before = file.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        _interrupted_write(file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]
    with pytest.raises(ValueError, match="not a folder"):
        state.save(tmp_path / "missing" / "state")
    state.save(file)


def test_the_cache_of_a_state_works_with_generate(model: LlamaForCausalLM) -> None:
    rnn, text = msrnn.RNN(model, "tova:16"), ids(50)
    _, state = rnn.read(text[0, :-1], rnn.start())
    mask = torch.ones_like(text)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    got = model.generate(text, past_key_values=state.cache, **options)
    want = model.generate(text, past_key_values=msrnn.cache(model, "tova:16"), **options)
    assert torch.equal(got, want)


def test_trace_against_the_states(model: LlamaForCausalLM, tmp_path: Path) -> None:
    rnn, text = msrnn.RNN(model, "tova-head:16", piece=13), ids(90)
    state = rnn.start(trace=True)
    kept = []
    for token in text[0].split(9):
        _, state = rnn.step(token[None], state)
        kept.append([{p for p in unit if p >= 0} for layer in state.layers for unit in layer.positions[0].tolist()])
    trace = state.trace
    trace.tokens = text
    trace.save(tmp_path / "trace")
    trace = msrnn.Trace.load(tmp_path / "trace")
    assert trace.length == 90
    assert torch.equal(trace.tokens, text)
    for part, units in enumerate(kept):
        held = [set(unit.nonzero().flatten().tolist()) for i in range(3) for unit in trace.held(i, 9 * part + 8)[0]]
        assert held == units
    assert int(trace.ages(0).max()) <= 89


def test_pieces_take_what_comes() -> None:
    assert list(pieces(iter(range(7)), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(pieces(torch.arange(4), 4)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("policy", ["tova:8", "h2o:8"])
def test_a_trace_follows_reordered_beams(model: LlamaForCausalLM, policy: str) -> None:
    """Rows that were reordered or repeated have the history of the row they came from."""
    rnn = msrnn.RNN(model, policy)
    rows = torch.cat([ids(30, seed) for seed in (1, 2)])
    _, state = rnn.step(rows, rnn.start(trace=True))
    state.cache.reorder_cache(torch.tensor([1, 1, 0]))
    _, state = rnn.step(ids(9, 5).repeat(3, 1), state)
    for row, seed in enumerate((2, 2, 1)):
        _, alone = rnn.step(ids(30, seed), rnn.start(trace=True))
        _, alone = rnn.step(ids(9, 5), alone)
        for ours, theirs in zip(state.trace.deaths, alone.trace.deaths, strict=True):
            assert torch.equal(ours[row], theirs[0])
