"""What `msrnn serve` refuses before vLLM starts. No vLLM needed."""

import json
from importlib.metadata import EntryPoints

import pytest

from msrnn.cli import main, serve
from msrnn.hf.geometry import Unsupported
from msrnn.hf.identity import ProfileError, profile_identity
from msrnn.vllm.plugin import Refused, check_version
from tests.support.serving import run, serve_command


def test_a_profile_made_for_another_model_is_refused(llama, started, tmp_path):
    """By the weights in the files; where there are none yet, by the name. One that names no model is accepted."""
    file = tmp_path / "profile.json"
    content = {"capacities": [10, 20, 30]}
    own, other = tmp_path / "own", tmp_path / "other"
    llama().save_pretrained(own)
    llama(initializer_range=0.1).save_pretrained(other)
    content["model"] = profile_identity(llama()) | {"name": "own"}
    file.write_text(json.dumps(content))
    options = ("--profile", str(file))
    run(str(own), *options)
    with pytest.raises(ProfileError, match=r"was made for another model, own \(other weights\); make one for this"):
        serve_command(str(other), *options)
    for folder in (own, other):
        (folder / "model.safetensors").unlink()
    run(str(own), *options)
    with pytest.raises(ProfileError, match="no weights here to compare, and the name is not other"):
        serve_command(str(other), *options)
    del content["model"]
    file.write_text(json.dumps(content))
    run(str(other), *options)
    assert [policy for _, policy in started] == ["tova:10;tova:20;tova:30"] * 3


def test_a_residual_for_a_model_with_a_soft_cap_is_refused(served_model, started):
    with pytest.raises(Unsupported, match="gemma2: a residual needs logits without a soft cap"):
        serve_command(served_model(model_type="gemma2", head_dim=16), "--policy", "blend:64")
    assert not started
    run(served_model(model_type="gemma2", head_dim=16), "--policy", "fade:64")
    assert len(started) == 1


@pytest.mark.parametrize(
    "extra, reason",
    [
        (["--speculative-config", "{}"], "speculative decoding takes tokens back"),
        (["--speculative_config={}"], "speculative decoding takes tokens back"),
        (["-sc", "{}"], "speculative decoding takes tokens back"),
        (["--speculative_config.method", "ngram"], "speculative decoding takes tokens back"),
        (["-sc.method=ngram"], "speculative decoding takes tokens back"),
        (["--spec-model", "x"], "speculative decoding takes tokens back"),
        (["--kv-transfer-config", "{}"], "KV connectors"),
        (["--kv-transfer-config.kv_connector", "OffloadingConnector"], "KV connectors"),
        (
            ["--kv-offloading-size", "4"],
            "--kv-offloading-size 4: it moves blocks .*; leave it out, or .* --prefix-pool",
        ),
        (["--kv_offloading_size=0", "--prefix-pool", "1MiB"], "--kv-offloading-size 0: it moves blocks of tokens"),
        (["--kv-cache-dtype", "fp8"], r"--kv-cache-dtype fp8: states are stored in the model's dtype \(bfloat16\)"),
        (["--kv-cache-dtype", "float16"], "leave it out, or use a policy with kv=int8"),
        (["--kv-cache-dtype", "bfloat16", "--dtype", "half"], r"the model's dtype \(float16\)"),
        (["--decode-context-parallel-size", "2"], "spreads a request's tokens"),
        (["-pcp", "2"], "--prefill-context-parallel-size spreads a request's tokens"),
        (["--attention-backend", "FLASH_ATTN"], "the backend is msrnn's"),
        (["--policy", "full"], "'full' is not bounded"),
        (["--policy", "tovva:64"], "did you mean 'tova:64'"),
        (["--max-model-len", "many"], "not a number"),
        (["--max-model-len", ""], "--max-model-len '' is not a number"),
        (["--max-model-len", "inf"], "--max-model-len 'inf' is not a number"),
        (["--kv-cache-memory-bytes", ""], "--kv-cache-memory-bytes '' is not a size"),
        (["--kv-cache-memory-bytes", " "], "--kv-cache-memory-bytes ' ' is not a size"),
    ],
)
def test_options_that_do_not_go_with_a_state_are_refused(served_model, started, extra, reason):
    with pytest.raises(ValueError, match=reason):
        serve_command(served_model(), *extra)
    assert not started


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8}, "latent attention"),
    ],
)
def test_models_that_cannot_be_bounded_are_refused(served_model, started, changes, reason):
    with pytest.raises(ValueError, match=reason):
        serve_command(served_model(**changes), "--policy", "tova:64")
    assert not started


def test_kv_heads_with_budgets_go_to_processes_whole(served_model, started, tmp_path):
    """Where several processes hold a copy of a KV head, each would decide by some of its query heads only."""
    file = tmp_path / "heads.json"
    file.write_text(json.dumps({"capacities": [[8, 24], [30, 2]]}))
    arguments = [served_model(), "--policy", "fade", "--profile", str(file)]
    run(*arguments, "--tensor-parallel-size", "2")
    assert started[0][1] == "fade:8|fade:24;fade:30|fade:2"
    for option in (["--tensor-parallel-size", "4"], ["-tp", "4"], ["--tensor_parallel_size=4"]):
        with pytest.raises(
            Refused, match="budgets for 2 KV heads in a layer, and there are 1 per process at --tensor-parallel-size 4"
        ):
            run(*arguments, *option)


@pytest.mark.parametrize("policy", ["key_difference:64", "./my_rule.py:64", "key_difference-head:64"])
def test_research_rules_are_refused_in_one_line(served_model, started, capsys, tmp_path, monkeypatch, policy):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rule.py").write_text("def score(view):\n    return view.weights.amax(2)\n")
    assert main(["serve", served_model(), "--policy", policy]) == 2
    error = capsys.readouterr().err
    assert "research policies have no kernel yet; use msrnn generate or msrnn eval, or a policy such as tova" in error
    assert error.count("\n") == 1
    assert not started


@pytest.mark.parametrize("policy, starts", [("h2o:64", False), ("tova-head:64", False), ("tova:64", True)])
def test_more_processes_than_kv_heads_that_decide_alone(served_model, started, capsys, policy, starts):
    name = served_model(num_attention_heads=9, num_key_value_heads=3, hidden_size=144)
    run(name, "--policy", policy, "--tensor-parallel-size", "3")
    arguments = ["serve", name, "--policy", policy, "--tensor-parallel-size", "9"]
    if starts:
        run(*arguments[1:])
        return
    assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "there are more processes than KV heads, and those that share a KV head" in error
    assert "lower --tensor-parallel-size, or use a policy whose layers decide as one" in error
    assert len(started) == 1


def test_learned_sinks_and_heads_that_decide_together_in_several_processes(served_model, started):
    """In layers with a window of the model's own that is the tighter bound, nobody decides."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    model = served_model(model_type="gpt_oss", head_dim=16, num_local_experts=4, **kinds)
    for policy, processes in (("tova:64", "1"), ("tova-head:64", "2"), ("h2o:64", "2"), ("window+4:64", "2")):
        run(model, "--policy", policy, "--tensor-parallel-size", processes)
    with pytest.raises(Refused, match=r"learned sinks, and --tensor-parallel-size 2 .*; use one process, or .*h2o"):
        serve_command(model, "--policy", "tova:64", "--tensor-parallel-size", "2")
    assert len(started) == 4


@pytest.mark.parametrize("version", ["0.29.0", "0.34.0", "1.0"])
def test_a_vllm_nobody_tried_is_refused(version, monkeypatch):
    monkeypatch.delenv("MSRNN_ANY_VLLM", raising=False)
    with pytest.raises(Refused, match=f"vLLM {version} was never tried"):
        check_version(version)
    check_version("0.32.0")
    monkeypatch.setenv("MSRNN_ANY_VLLM", "1")
    check_version(version)


def test_a_vllm_that_would_not_load_the_plugin_is_refused(served_model, started, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other,plugins")
    with pytest.raises(Refused, match="VLLM_PLUGINS='other,plugins' keeps msrnn out"):
        serve_command(served_model(), "--policy", "tova:64")
    monkeypatch.setenv("VLLM_PLUGINS", "other,msrnn")
    monkeypatch.setattr("msrnn.vllm.plugin.entry_points", lambda group: EntryPoints())
    with pytest.raises(Refused, match=r"just on the path here; pip install \. in a clone of msrnn"):
        serve_command(served_model(), "--policy", "tova:64")
    assert not started


def test_without_vllm_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    monkeypatch.setattr("msrnn.cli.COMMANDS", (serve,))
    assert main(["serve", "any/model", "--policy", "tova:64"]) == 2
    way_out = 'pip install ".[vllm]" in a clone of msrnn'
    assert capsys.readouterr().err == f"msrnn: error: vLLM is not installed here; {way_out}\n"
