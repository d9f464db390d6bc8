"""Matmuls that share their input, as one: the same numbers, the same model before and after."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from msrnn import Engine
from msrnn.engine import projections as under_test
from msrnn.engine.pipeline import Wavefront
from msrnn.engine.projections import Joined
from msrnn.rnn import RNN

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture
def matmuls(monkeypatch):
    """Rows of every weight that a joined matmul was made with."""
    seen, whole = [], under_test.linear
    monkeypatch.setattr(
        under_test, "linear", lambda x, weight, bias: seen.append(len(weight)) or whole(x, weight, bias)
    )
    return seen


def test_the_same_in_fewer_matmuls(llama, matmuls):
    model = llama(num_hidden_layers=2).double()
    want = model(IDS).logits
    with Joined(model):
        got = model(IDS).logits
    sizes = model.model.layers[0].self_attn, model.model.layers[0].mlp
    each = [sum(len(getattr(sizes[i], name).weight) for name in names) for i, names in enumerate(under_test.GROUPS)]
    assert matmuls == each * 2
    assert torch.allclose(got, want, atol=1e-12)


def test_biases_are_joined_too(matmuls):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2)).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    want = model(IDS).logits
    with Joined(model):
        assert torch.allclose(model(IDS).logits, want, atol=1e-12)
    assert matmuls == [32 + 16 + 16, 96]


def test_the_model_is_what_it_was(llama, tmp_path):
    model = llama(num_hidden_layers=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    with Joined(model):
        assert type(model.model.layers[0].mlp.up_proj) is not nn.Linear
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_weights_move_once_and_are_held_once(llama):
    model = llama(num_hidden_layers=1)
    Joined(model)
    attention = model.model.layers[0].self_attn
    places = [parameter.data_ptr() for parameter in model.parameters()]
    second = Joined(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    with torch.no_grad():
        attention.k_proj.weight.mul_(3)  # whoever changes a weight in place changes the joined one
    want = model(IDS).logits
    with second:
        assert torch.allclose(model(IDS).logits, want, atol=1e-6)


def test_what_is_more_than_a_linear_layer_stays(llama, matmuls):
    model = llama(num_hidden_layers=1)
    layer, heard = model.model.layers[0], []
    layer.self_attn.k_proj.register_forward_hook(lambda *_: heard.append(1))

    class Adapted(nn.Linear):
        """As an adapter library's."""

    layer.mlp.gate_proj.__class__ = Adapted
    with Joined(model):
        model(IDS)
    assert matmuls == []
    assert heard == [1]


def test_another_input_is_not_mistaken(llama):
    group = under_test._Group([nn.Linear(4, 3), nn.Linear(4, 2)])
    one, other = torch.randn(2, 1, 4)
    group.share(one, 0)
    assert torch.equal(group.share(other, 1), nn.functional.linear(other, group.weight, group.bias)[:, 3:])


@pytest.mark.parametrize("compiled", [False, True])
def test_an_engine_writes_the_same(llama, monkeypatch, matmuls, compiled):
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **more: whole(*args, backend="eager", **more))
    model, texts = llama(num_hidden_layers=2), [IDS[0].tolist() * 3, IDS[0, :3].tolist()]
    want = Engine(model, "tova:8", batch=2).generate(texts, max_new_tokens=6)
    assert not matmuls
    got = Engine(model, "tova:8", batch=2, joined=True, compiled=compiled).generate(texts, max_new_tokens=6)
    assert got == want
    assert compiled or matmuls


def test_a_wavefront_reads_the_same(llama, matmuls):
    model = llama(num_hidden_layers=2)
    rnn, ids = RNN(model, "tova:8", chunk=6), IDS.repeat(1, 6)
    want, _ = rnn.step(ids, rnn.start())
    got, _ = Wavefront(rnn, chunk=6, lanes=2, laps=2, joined=True).read(ids)
    assert matmuls
    assert torch.allclose(got, want, atol=1e-4)
