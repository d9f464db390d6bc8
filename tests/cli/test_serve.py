"""`msrnn serve` up to the moment vLLM would start: what it says, and how vLLM is started. No vLLM needed."""

import json

import pytest

from msrnn.cli import main, serve
from msrnn.vllm.lane_count import WORKER
from msrnn.vllm.pool import SCHEDULER
from tests.support.serving import run

LOOPBACK = ["--host", "127.0.0.1"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_own_options_may_stand_among_vllms(served_model, started, order):
    own, name = ["--policy", "tova:64", "--prefix-pool", "0"], served_model()
    run(*(own if order == "before" else []), name, "--port", "8001", *(own if order == "after" else []), "--seed=3")
    assert started == [([name, "--port", "8001", "--seed=3", *LOOPBACK], "tova:64")]


def test_options_on_both_sides_of_the_model_count_as_if_on_one(served_model, started, monkeypatch):
    files = []
    monkeypatch.setattr(serve, "_prefix_files", lambda arguments, *_: files.append(arguments.prefix) or {})
    sides = (["--policy", "tova:32", "--prefix", "a=A"], ["--prefix", "b=B", "--policy", "tova:64"])
    run(*sides[0], served_model(), *sides[1])
    run(served_model(), *sides[0], *sides[1])
    run(*sides[0], *sides[1], served_model())
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
        (["--long-prefill-token-threshold", "64", "--long-prefill-token-threshold-adaptive"], []),
        (["--long-prefill-token-threshold", "0"], []),
        (["--no-long-prefill-token-threshold-adaptive"], ["--long-prefill-token-threshold", "512"]),
        (["--no_long_prefill_token_threshold_adaptive"], ["--long-prefill-token-threshold", "512"]),
        (["--long-prefill-token-threshold-adaptive"], ["--long-prefill-token-threshold", "512"]),
        (["--no-enable-chunked-prefill"], []),
        (["--disable-chunked-prefill"], []),
    ],
)
def test_on_a_gpu_a_batch_takes_pieces_of_many_prompts(served_model, started, monkeypatch, options, pieces):
    """Unless the user says otherwise."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    name = served_model()
    run(name, "--policy", "tova:64", "--prefix-pool", "0", *options)
    assert started[0][0] == [name, *options, *pieces, "--worker-cls", WORKER, *LOOPBACK]


def test_false_in_vllms_configuration_file_is_an_option_too(served_model, started, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for option, pieces in (("long_prefill_token_threshold_adaptive", True), ("enable-chunked-prefill", False)):
        (tmp_path / "vllm.yaml").write_text(f"{option}: false\n")
        run(served_model(), "--policy", "tova:64", "--config", str(tmp_path / "vllm.yaml"))
        command = started.pop()[0]
        assert ("--long-prefill-token-threshold" in command) == pieces
        assert "--long-prefill-token-threshold-adaptive" not in command


def test_older_vllm_cannot_give_few_prompts_larger_pieces(served_model, started, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("msrnn.vllm.plugin.vllm_version", lambda: "0.31.0")
    run(served_model(), "--policy", "tova:64", "--prefix-pool", "0")
    assert started[0][0][1:] == ["--long-prefill-token-threshold", "512", "--worker-cls", WORKER, *LOOPBACK]


def test_a_worker_of_the_users_own_stays(served_model, started, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run(served_model(), "--policy", "tova:64", "--worker-cls", "x.Y")
    assert started[0][0].count("--worker-cls") == 1


def test_on_a_gpu_the_pool_must_be_asked_for(served_model, started, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run(served_model(), "--policy", "tova:64")
    run(served_model(), "--policy", "tova:64", "--prefix-pool", "1MiB")
    assert ["--kv-transfer-config" in command for command, *_ in started] == [False, True]


@pytest.mark.parametrize(
    "options, states",
    [([], 2**32 // 18048), (["--prefix-pool", "1MiB"], 2**20 // 18048), (["--scheduler-cls", "x.Y"], 2**32 // 18048)],
)
def test_states_of_earlier_prompts_are_kept_in_a_pool(served_model, started, monkeypatch, options, states):
    """4 GiB by default, on a machine that has 64; a scheduler of the user's own stays."""
    monkeypatch.setattr("msrnn.system.memory.usable", lambda: 64 << 30)
    run(served_model(), "--policy", "tova:64", *options)
    command = started[0][0]
    connector = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_extra_config"] == {"prefixes": {}, "states": states}
    schedulers = [command[at + 1] for at, option in enumerate(command) if option == "--scheduler-cls"]
    assert schedulers == [options[1] if "--scheduler-cls" in options else "msrnn.vllm.scheduler.scheduler"]


def test_prefix_files_alone_need_our_scheduler_too(served_model, started, monkeypatch):
    """Without it vLLM keeps blocks from being free at once, and cannot preempt all requests while a batch runs."""
    monkeypatch.setattr(serve, "_prefix_files", lambda *_: {"a": "/A"})
    run(served_model(), "--policy", "tova:64", "--prefix", "a=A", "--prefix-pool", "0")
    run(served_model(), "--policy", "tova:64", "--prefix", "a=A", "--prefix-pool", "0", "--scheduler-cls", "x.Y")
    commands = [command for command, _ in started]
    connector = json.loads(commands[0][commands[0].index("--kv-transfer-config") + 1])
    assert connector["kv_connector_extra_config"] == {"prefixes": {"a": "/A"}, "states": 0}
    assert commands[0][commands[0].index("--scheduler-cls") + 1] == SCHEDULER
    assert commands[1].count("--scheduler-cls") == 1


def test_the_default_pool_is_an_eighth_of_what_the_container_may_use(served_model, started, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 64 << 30}))
    monkeypatch.setattr("msrnn.system.memory.cgroup_limits", lambda: [1 << 30, 2 << 30])
    run(served_model(), "--policy", "tova:64")
    command = started[0][0]
    connector = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_extra_config"]["states"] == (1 << 30) // 8 // 18048


def test_a_pool_smaller_than_a_state_is_refused(served_model, started, capsys):
    assert main(["serve", served_model(), "--policy", "tova:64", "--prefix-pool", "10KB"]) == 2
    assert "--prefix-pool 10KB is less than one state, 17.6 KiB; give more, or 0 for none" in capsys.readouterr().err
    assert not started


def test_it_says_what_a_request_takes(served_model, started, capsys):
    """65 slots x 2 layers x 2 KV heads x 2 x 16 numbers x 2 bytes, and positions of 8 bytes each, by hand."""
    run(served_model(), "--policy", "tova:64", "--kv-cache-memory-bytes", "1Gi")
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
def test_it_says_who_can_reach_it(served_model, started, capsys, given, note, added):
    name = served_model()
    run(name, "--policy", "tova:64", "--prefix-pool", "0", *given)
    assert f"msrnn: {note}\n" in capsys.readouterr().err
    assert started[0][0] == [name, *given, *added]


def test_a_key_in_the_environment_counts(served_model, started, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    run(served_model(), "--policy", "tova:64", "--host", "0.0.0.0")
    output = capsys.readouterr().err
    assert KEYED in output
    assert "secret" not in output


def test_vllms_configuration_file_is_read(served_model, started, capsys, tmp_path):
    """An address there is not replaced; what a state cannot support is refused there too."""
    file = tmp_path / "vllm.yaml"
    file.write_text("host: 0.0.0.0\nport: 7000\nmax_model_len: 800\nenforce-eager: true\n")
    run(served_model(), "--policy", "tova:1/8", "--config", str(file), "--port", "7001")
    assert f"listens on 0.0.0.0:7001: {OPEN}" in capsys.readouterr().err
    assert "--host" not in started[0][0]
    assert started[0][1] == "tova:100"
    for text, reason in (("kv-cache-dtype: fp8", "the model's dtype"), ("- a", "option: value"), ("a: [", "not YAML")):
        file.write_text(text)
        assert main(["serve", served_model(), "--policy", "tova:64", "--config", str(file)]) == 2
        assert reason in capsys.readouterr().err
    assert main(["serve", served_model(), "--policy", "tova:64", "--config", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert len(started) == 1


@pytest.mark.parametrize(
    "options", [["auto"], ["bfloat16"], ["float16", "--dtype", "float16"], ["bfloat16", "--dtype=bfloat16"]]
)
def test_vllms_cache_may_have_the_models_dtype(served_model, started, options):
    run(served_model(), "--kv-cache-dtype", *options)
    assert len(started) == 1


def test_fractions_are_of_the_served_length(served_model, started):
    run(served_model(), "--policy", "tova:1/8", "--max_model_len", "800")
    assert started[0][1] == "tova:100"


def test_a_profile_gives_every_layer_its_own(served_model, started, tmp_path):
    (tmp_path / "profile.json").write_text('{"capacities": [10, 30]}')
    run(served_model(), "--policy", "tova", "--profile", str(tmp_path / "profile.json"))
    assert started[0][1] == "tova:10;tova:30"


def test_a_size_in_bytes_bounds_the_state_of_a_request(served_model, started):
    """By hand: 2 layers of k + 1 slots, each 2 KV heads (or 4 heads) x 2 x 16 numbers x 2 bytes and a position each."""
    for policy in ("tova:20000B", "tova-query-head:20000B"):
        run(served_model(), "--policy", policy)
    assert [policy for _, policy in started] == ["tova:72", "tova-query-head:33"]
    assert 2 * (73 * 136 + 16) <= 20_000 < 2 * (74 * 136 + 16)
    assert 2 * (34 * 288 + 40) <= 20_000 < 2 * (35 * 288 + 40)
