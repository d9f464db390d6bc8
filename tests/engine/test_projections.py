"""Fused QKV and gate/up projections: the same numbers, the same model before and after."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from msrnn import Engine
from msrnn.engine import projections as under_test
from msrnn.engine.engine import EngineOptions
from msrnn.engine.pipeline import PipelinedPrefill
from msrnn.engine.projections import FusedProjections
from msrnn.rnn import RNN

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture
def matmuls(monkeypatch):
    """Rows of the weight of every fused matmul."""
    seen, whole = [], under_test.linear
    monkeypatch.setattr(
        under_test, "linear", lambda x, weight, bias: seen.append(len(weight)) or whole(x, weight, bias)
    )
    return seen


def test_the_same_in_fewer_matmuls(llama, matmuls):
    model = llama(num_hidden_layers=2).double()
    want = model(IDS).logits
    with FusedProjections(model):
        got = model(IDS).logits
    sizes = model.model.layers[0].self_attn, model.model.layers[0].mlp
    each = [sum(len(getattr(sizes[i], name).weight) for name in names) for i, names in enumerate(under_test.GROUPS)]
    assert matmuls == each * 2
    assert torch.allclose(got, want, atol=1e-12)


def test_biases_are_fused_too(matmuls):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2)).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    want = model(IDS).logits
    with FusedProjections(model):
        assert torch.allclose(model(IDS).logits, want, atol=1e-12)
    assert matmuls == [32 + 16 + 16, 96]


def test_the_model_is_unchanged_afterwards(llama, tmp_path):
    model = llama(num_hidden_layers=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    with FusedProjections(model):
        assert type(model.model.layers[0].mlp.up_proj) is not nn.Linear
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_weights_are_moved_once_and_not_copied(llama):
    model = llama(num_hidden_layers=1)
    FusedProjections(model)
    attention = model.model.layers[0].self_attn
    places = [parameter.data_ptr() for parameter in model.parameters()]
    second = FusedProjections(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    with torch.no_grad():
        attention.k_proj.weight.mul_(3)  # an in-place change of a weight changes the fused one
    want = model(IDS).logits
    with second:
        assert torch.allclose(model(IDS).logits, want, atol=1e-6)


def test_only_plain_linear_layers_are_fused(llama, matmuls):
    model = llama(num_hidden_layers=1)
    layer, calls = model.model.layers[0], []
    layer.self_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))

    class Adapted(nn.Linear):
        """As an adapter library's."""

    layer.mlp.gate_proj.__class__ = Adapted
    with FusedProjections(model):
        model(IDS)
    assert matmuls == []
    assert calls == [1]


def test_another_input_is_computed_anew(llama):
    group = under_test._Group([nn.Linear(4, 3), nn.Linear(4, 2)])
    one, other = torch.randn(2, 1, 4)
    group.part(one, 0)
    assert torch.equal(group.part(other, 1), nn.functional.linear(other, group.weight, group.bias)[:, 3:])


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_an_engine_writes_the_same(llama, monkeypatch, matmuls, compile):
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **more: whole(*args, backend="eager", **more))
    model, texts = llama(num_hidden_layers=2), [IDS[0].tolist() * 3, IDS[0, :3].tolist()]
    want = Engine(model, "tova:8", batch=2).generate(texts, max_new_tokens=6)
    assert not matmuls
    options = EngineOptions(fused_projections=True, compile=compile)
    assert Engine(model, "tova:8", batch=2, options=options).generate(texts, max_new_tokens=6) == want
    assert compile or matmuls


def test_a_pipeline_reads_the_same(llama, matmuls):
    model = llama(num_hidden_layers=2)
    rnn, ids = RNN(model, "tova:8", chunk=6), IDS.repeat(1, 6)
    want, _ = rnn.step(ids, rnn.start())
    got, _ = PipelinedPrefill(rnn, chunk=6, lanes=2, laps=2, fused_projections=True).read(ids)
    assert matmuls
    assert torch.allclose(got, want, atol=1e-4)
