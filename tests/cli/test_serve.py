"""`msrnn serve` up to the moment vLLM would start: what it says, what it refuses. No vLLM needed."""

import json
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from msrnn.cli import main, serve
from msrnn.cli.argument_parser import Parser
from msrnn.hf.identity import ProfileError, profile_identity
from msrnn.vllm.lane_count import WORKER
from msrnn.vllm.plugin import Refused, check_version

LOOPBACK = ["--host", "127.0.0.1"]


@pytest.fixture
def model(tmp_path):
    """A model's configuration, which is all that is looked at."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1000,
        "vocab_size": 32,
        "dtype": "bfloat16",
    }

    def write(**changes) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return str(tmp_path)

    return write


@pytest.fixture
def started(monkeypatch):
    """The command that vLLM would be started with, and its policy."""
    calls = []
    monkeypatch.setattr(serve, "run_server", lambda command, policy, _: calls.append((command, policy)) or 0)
    monkeypatch.setattr(serve, "find_spec", lambda name: object())
    monkeypatch.setattr("msrnn.vllm.plugin.vllm_version", lambda: "0.32.0")
    own = EntryPoints([EntryPoint("msrnn", "msrnn.vllm:register", "vllm.general_plugins")])
    monkeypatch.setattr("msrnn.vllm.plugin.entry_points", lambda group: own.select(group=group))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_PLUGINS", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return calls


def serve_command(*arguments: str) -> None:
    commands = Parser(prog="msrnn").add_subparsers(parser_class=Parser)
    serve.add(commands)
    parsed = commands.choices["serve"].parse_args(list(arguments))
    parsed.run(parsed)


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stop:
        serve_command(*arguments)
    assert stop.value.code == 0


@pytest.mark.parametrize("order", ["before", "after"])
def test_own_options_may_stand_among_vllms(model, started, order):
    own, name = ["--policy", "tova:64", "--prefix-pool", "0"], model()
    run(*(own if order == "before" else []), name, "--port", "8001", *(own if order == "after" else []), "--seed=3")
    assert started == [([name, "--port", "8001", "--seed=3", *LOOPBACK], "tova:64")]


def test_options_on_both_sides_of_the_model_count_as_if_on_one(model, started, monkeypatch):
    files = []
    monkeypatch.setattr(serve, "_prefix_files", lambda arguments, *_: files.append(arguments.prefix) or {})
    sides = (["--policy", "tova:32", "--prefix", "a=A"], ["--prefix", "b=B", "--policy", "tova:64"])
    run(*sides[0], model(), *sides[1])
    run(model(), *sides[0], *sides[1])
    run(*sides[0], *sides[1], model())
    assert files == [["a=A", "b=B"]] * 3
    assert [policy for _, policy in started] == ["tova:64"] * 3


@pytest.mark.parametrize(
    "options, pieces",
    [
        ([], ["--long-prefill-token-threshold", "512", "--long-prefill-token-threshold-adaptive"]),
        (
            ["--max-model-len", "300"],
            ["--long-prefill-token-threshold", "300", "--long-prefill-token-threshold-adaptive"],
        ),
        (["--long-prefill-token-threshold", "64"], []),
        (["--long_prefill_token_threshold=64"], []),
        (["--no-enable-chunked-prefill"], []),
    ],
)
def test_on_a_gpu_a_batch_takes_pieces_of_many_prompts(model, started, monkeypatch, options, pieces):
    """Unless the user says otherwise."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    name = model()
    run(name, "--policy", "tova:64", "--prefix-pool", "0", *options)
    assert started[0][0] == [name, *options, *pieces, "--worker-cls", WORKER, *LOOPBACK]


def test_older_vllm_cannot_give_few_prompts_larger_pieces(model, started, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("msrnn.vllm.plugin.vllm_version", lambda: "0.31.0")
    run(model(), "--policy", "tova:64", "--prefix-pool", "0")
    assert started[0][0][1:] == ["--long-prefill-token-threshold", "512", "--worker-cls", WORKER, *LOOPBACK]


def test_a_worker_of_the_users_own_stays(model, started, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run(model(), "--policy", "tova:64", "--worker-cls", "x.Y")
    assert started[0][0].count("--worker-cls") == 1


def test_on_a_gpu_the_pool_must_be_asked_for(model, started, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run(model(), "--policy", "tova:64")
    run(model(), "--policy", "tova:64", "--prefix-pool", "1MiB")
    assert ["--kv-transfer-config" in command for command, *_ in started] == [False, True]


@pytest.mark.parametrize(
    "options, states",
    [([], 2**32 // 18048), (["--prefix-pool", "1MiB"], 2**20 // 18048), (["--scheduler-cls", "x.Y"], 2**32 // 18048)],
)
def test_states_of_earlier_prompts_are_kept_in_a_pool(model, started, monkeypatch, options, states):
    """4 GiB by default, on a machine that has 64; a scheduler of the user's own stays."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 64 << 30}))
    run(model(), "--policy", "tova:64", *options)
    command = started[0][0]
    connector = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_extra_config"] == {"prefixes": {}, "states": states}
    schedulers = [command[at + 1] for at, option in enumerate(command) if option == "--scheduler-cls"]
    assert schedulers == [options[1] if "--scheduler-cls" in options else "msrnn.vllm.scheduler.scheduler"]


def test_a_pool_smaller_than_a_state_is_refused(model, started, capsys):
    assert main(["serve", model(), "--policy", "tova:64", "--prefix-pool", "10KB"]) == 2
    assert "--prefix-pool 10KB is less than one state, 17.6 KiB; give more, or 0 for none" in capsys.readouterr().err
    assert not started


def test_it_says_what_a_request_takes(model, started, capsys):
    """65 slots x 2 layers x 2 KV heads x 2 x 16 numbers x 2 bytes, and positions of 8 bytes each, by hand."""
    run(model(), "--policy", "tova:64", "--kv-cache-memory-bytes", "1Gi")
    rows, positions, slot, seen = 65 * 2 * 2 * 16 * 2, -(-65 * 8 // 64) * 64, 64, 64
    state, full = 2 * (rows + positions + slot + seen), 1000 * 2 * 2 * 2 * 16 * 2
    output = capsys.readouterr().err
    assert f"a request takes {state / 1024:.1f} KiB" in output
    assert f"{2**30 // state:,} requests at once; a full cache {2**30 // full:,} of that length" in output


LOCAL = "only this machine can reach it; --host 0.0.0.0 opens it to others"
KEYED = "others can reach it and need the key, but not for /metrics, /health and paths outside /v1"
OPEN = "everyone who can reach this machine can use it; --api-key KEY asks for a key"


@pytest.mark.parametrize(
    "given, note, added",
    [
        ([], f"listens on 127.0.0.1:8000: {LOCAL}", LOOPBACK),
        (["--port", "81", "--api-key", "k"], f"listens on 127.0.0.1:81: {LOCAL}", LOOPBACK),
        (["--host", "127.0.0.2"], f"listens on 127.0.0.2:8000: {LOCAL}", []),
        (["--host=::1"], f"listens on ::1:8000: {LOCAL}", []),
        (["--host", "0.0.0.0"], f"listens on 0.0.0.0:8000: {OPEN}", []),
        (["--host", "0.0.0.0", "--api-key", ""], f"listens on 0.0.0.0:8000: {OPEN}", []),
        (["--host", "gpu7", "--api_key", "a", "b", "--port", "9"], f"listens on gpu7:9: {KEYED}", []),
        (["--uds", "/run/x"], "listens on the socket /run/x: whoever may open that file can use it", []),
    ],
)
def test_it_says_who_can_reach_it(model, started, capsys, given, note, added):
    name = model()
    run(name, "--policy", "tova:64", "--prefix-pool", "0", *given)
    assert f"msrnn: {note}\n" in capsys.readouterr().err
    assert started[0][0] == [name, *given, *added]


def test_a_key_in_the_environment_counts(model, started, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    run(model(), "--policy", "tova:64", "--host", "0.0.0.0")
    output = capsys.readouterr().err
    assert KEYED in output
    assert "secret" not in output


def test_vllms_configuration_file_is_read(model, started, capsys, tmp_path):
    """An address there is not replaced; what a state cannot support is refused there too."""
    file = tmp_path / "vllm.yaml"
    file.write_text("host: 0.0.0.0\nport: 7000\nmax_model_len: 800\nenforce-eager: true\n")
    run(model(), "--policy", "tova:1/8", "--config", str(file), "--port", "7001")
    assert f"listens on 0.0.0.0:7001: {OPEN}" in capsys.readouterr().err
    assert "--host" not in started[0][0]
    assert started[0][1] == "tova:100"
    for text, reason in (("kv-cache-dtype: fp8", "the model's dtype"), ("- a", "option: value"), ("a: [", "not YAML")):
        file.write_text(text)
        assert main(["serve", model(), "--policy", "tova:64", "--config", str(file)]) == 2
        assert reason in capsys.readouterr().err
    assert main(["serve", model(), "--policy", "tova:64", "--config", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert len(started) == 1


@pytest.mark.parametrize(
    "options", [["auto"], ["bfloat16"], ["float16", "--dtype", "float16"], ["bfloat16", "--dtype=bfloat16"]]
)
def test_vllms_cache_may_have_the_models_dtype(model, started, options):
    run(model(), "--kv-cache-dtype", *options)
    assert len(started) == 1


def test_fractions_are_of_the_served_length(model, started):
    run(model(), "--policy", "tova:1/8", "--max_model_len", "800")
    assert started[0][1] == "tova:100"


def test_a_profile_gives_every_layer_its_own(model, started, tmp_path):
    (tmp_path / "profile.json").write_text('{"capacities": [10, 30]}')
    run(model(), "--policy", "tova", "--profile", str(tmp_path / "profile.json"))
    assert started[0][1] == "tova:10;tova:30"


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


@pytest.mark.parametrize(
    "extra, reason",
    [
        (["--speculative-config", "{}"], "speculative decoding takes tokens back"),
        (["--speculative_config={}"], "speculative decoding takes tokens back"),
        (["--kv-transfer-config", "{}"], "KV connectors"),
        (["--kv-cache-dtype", "fp8"], r"--kv-cache-dtype fp8: states are stored in the model's dtype \(bfloat16\)"),
        (["--kv-cache-dtype", "float16"], "leave it out, or use a policy with kv=int8"),
        (["--kv-cache-dtype", "bfloat16", "--dtype", "half"], r"the model's dtype \(float16\)"),
        (["--decode-context-parallel-size", "2"], "spreads a request's tokens"),
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
def test_options_that_do_not_go_with_a_state_are_refused(model, started, extra, reason):
    with pytest.raises(ValueError, match=reason):
        serve_command(model(), *extra)
    assert not started


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8}, "latent attention"),
    ],
)
def test_models_that_cannot_be_bounded_are_refused(model, started, changes, reason):
    with pytest.raises(ValueError, match=reason):
        serve_command(model(**changes), "--policy", "tova:64")
    assert not started


def test_kv_heads_with_budgets_go_to_processes_whole(model, started, tmp_path):
    """Where several processes hold a copy of a KV head, each would decide by some of its query heads only."""
    file = tmp_path / "heads.json"
    file.write_text(json.dumps({"capacities": [[8, 24], [30, 2]]}))
    arguments = [model(), "--policy", "fade", "--profile", str(file)]
    run(*arguments, "--tensor-parallel-size", "2")
    assert started[0][1] == "fade:8|fade:24;fade:30|fade:2"
    for option in (["--tensor-parallel-size", "4"], ["-tp", "4"], ["--tensor_parallel_size=4"]):
        with pytest.raises(
            Refused, match="budgets for 2 KV heads in a layer, and there are 1 per process at --tensor-parallel-size 4"
        ):
            run(*arguments, *option)


@pytest.mark.parametrize("version", ["0.29.0", "0.33.0", "1.0"])
def test_a_vllm_nobody_tried_is_refused(version, monkeypatch):
    monkeypatch.delenv("MSRNN_ANY_VLLM", raising=False)
    with pytest.raises(Refused, match=f"vLLM {version} was never tried"):
        check_version(version)
    check_version("0.32.0")
    monkeypatch.setenv("MSRNN_ANY_VLLM", "1")
    check_version(version)


def test_a_vllm_that_would_not_load_the_plugin_is_refused(model, started, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other,plugins")
    with pytest.raises(Refused, match="VLLM_PLUGINS='other,plugins' keeps msrnn out"):
        serve_command(model(), "--policy", "tova:64")
    monkeypatch.setenv("VLLM_PLUGINS", "other,msrnn")
    monkeypatch.setattr("msrnn.vllm.plugin.entry_points", lambda group: EntryPoints())
    with pytest.raises(Refused, match="just on the path"):
        serve_command(model(), "--policy", "tova:64")
    assert not started


def test_without_vllm_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    monkeypatch.setattr("msrnn.cli.COMMANDS", (serve,))
    assert main(["serve", "any/model", "--policy", "tova:64"]) == 2
    assert capsys.readouterr().err == 'msrnn: error: vLLM is not installed here; pip install "msrnn[vllm]"\n'
