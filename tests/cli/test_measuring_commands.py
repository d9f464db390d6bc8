"""`msrnn advise` and `msrnn calibrate` end to end, on a tiny model in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from msrnn.cli import main
from msrnn.hf.load import bundled

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("models") / "tiny", layers=3)


def saved(folder: Path, layers: int) -> str:
    """A tiny random model with the bundled tokenizer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 49152, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.05)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled(progress=False)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def book(tmp_path: Path) -> str:
    file = tmp_path / "book.txt"
    file.write_text(
        "".join(f"On day {i} the keeper counted {i * 7 % 13} ships and wrote it down.\n" for i in range(60))
    )
    return str(file)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["", ",kv=int8"])
def test_calibrate_then_generate(
    model: str, book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kv: str
) -> None:
    out = str(tmp_path / "profile.json")
    sizes = ["--length", "64", "--chunks", "2", "--grid", "4,12,32", "--rounds", "1"]
    sizes += ["--policy", f"tova{kv}"] if kv else []  # tova is the default
    command = ["calibrate", model, "--text", book, "--average", "12", "--average", "16", "-o", out, *sizes, "-q"]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert f"tova{kv} for tiny, measured on 2 x 64 tokens" in output
    assert "capacities by layer, average 16" in output
    profile_file = json.loads(Path(out).read_text())
    assert profile_file["policy"] == f"tova{kv}"
    assert sum(profile_file["capacities"]) == 36
    assert profile_file["text"]["names"] == ["book.txt"]
    assert len(profile_file["text"]["sha256"][0]) == 64
    measured = Path(f"{out}.measured.jsonl").read_text()
    assert main([*command, "--json"]) == 0  # everything is known: nothing is measured again
    assert json.loads(capsys.readouterr().out) == profile_file
    assert Path(f"{out}.measured.jsonl").read_text() == measured

    other = [*command[: command.index("--average")], "--average", "14", *command[command.index("-o") :]]
    other[other.index("--rounds") + 1] = "0"
    first = profile_file["losses"][0] | {"average": 5000}  # outside the grid: nobody asks for it again
    edited = profile_file | {"capacities": [4, 4, 28], "losses": [first, profile_file["losses"][1]]}
    Path(out).write_text(json.dumps(edited))
    assert main(other) == 0  # another average joins those that are there, and they stay as they are
    capsys.readouterr()
    joined = json.loads(Path(out).read_text())
    kept = {"12": [4, 4, 28], "16": profile_file["allocations"]["16"]}
    assert (joined["average"], joined["allocations"]) == (14, kept)
    assert joined["losses"][1:] == edited["losses"]
    Path(out).write_text(json.dumps(profile_file))

    use = ["generate", "Once upon", "--model", model, "--policy", f"tova:12{kv}", "--profile", out]
    use += ["--max-new-tokens", "3"]
    assert main([*use, "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["capacities"] == profile_file["capacities"]
    assert main(["info", model, f"tova:16{kv},profile={out}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slots"] == [c + 1 for c in profile_file["allocations"]["16"]]

    use[use.index(model)] = saved(tmp_path / "other", layers=2)
    assert main([*use, "-q"]) == 2
    assert "was made for another model, tiny (3 layers, not 2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["", ",kv=k8v4"])
def test_calibrate_by_head_then_generate(
    model: str, book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kv: str
) -> None:
    out = str(tmp_path / "heads.json")
    sizes = ["--by", "head", "--policy", f"fade{kv}", "--length", "64", "--chunks", "2", "--grid", "4,8,16,32"]
    command = ["calibrate", model, "--text", book, "--average", "12", "--average", "16", "-o", out, *sizes, "-q"]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert f"fade{kv} for tiny, measured on 2 x 64 tokens" in output
    assert "same for all heads" in output
    profile = json.loads(Path(out).read_text())
    assert (profile["by"], [len(heads) for heads in profile["capacities"]]) == ("head", [2, 2, 2])
    assert sum(map(sum, profile["capacities"])) == 6 * 12
    assert "/".join(map(str, profile["capacities"][0])) in output
    measured = Path(f"{out}.measured.jsonl").read_text()
    assert main([*command, "--json"]) == 0  # everything is known: nothing is estimated again
    assert json.loads(capsys.readouterr().out) == profile
    assert Path(f"{out}.measured.jsonl").read_text() == measured

    use = ["generate", "Once upon", "--model", model, "--policy", f"fade:16{kv}", "--profile", out]
    use += ["--max-new-tokens", "3"]
    assert main([*use, "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["capacities"] == profile["allocations"]["16"]


@pytest.mark.slow
def test_advise(model: str, book: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["advise", model, "--text", book, "--within", "5%", "--length", "128", "--memory", "1GiB", "-q"]
    assert main([*command, "--policy", "tova", "--policy", "window+4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["within"], facts["length"], facts["memory_bytes"]) == ("5 %", 128, 1 << 30)
    tova, window = facts["policies"]
    assert (tova["policy"], window["policy"]) == ("tova", "window+4")
    assert 16 <= tova["capacity"] <= 128
    assert tova["over_full"] <= 0.05 * facts["full_perplexity"] + 1e-3
    assert tova["batch"] >= tova["full_batch"] > 0
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "asked for: within 5 %" in output
    assert [line.split(" ")[0] for line in output.splitlines()][4:9] == ["best", "tova", "fade", "h2o", "window+4"]
    assert "not timed here" in output


@pytest.mark.parametrize(
    "command, reason",
    [
        (["advise", "--within", "0.4"], "--text"),
        (
            ["advise", "--text", "BOOK", "--within", "some"],
            "--within 'some' is not a tolerance above 0; write perplexity points (0.4)",
        ),
        (["advise", "--text", "no.txt", "--within", "1"], "there is no file no.txt"),
        (["advise", "--text", ".", "--within", "1"], "is a folder; give text files"),
        (["advise", "--text", "BOOK", "--within", "1", "--policy", "tova:64"], "names a size; give the kind alone"),
        (["advise", "--text", "BOOK", "--within", "1", "--policy", "tovo"], "did you mean 'tova'"),
        (["advise", "--text", "BOOK", "--within", "1", "--memory", "much"], "argument --memory: 'much' is not a size"),
        (["advise", "--text", "BOOK", "--within", "1", "--policy", "tova,profile=no.json"], "no.json cannot be read"),
        (["calibrate", "-o", "p.json"], "--average"),
        (["calibrate", "--average", "8", "-o", "."], ". is a folder; give the name of a file"),
        (["calibrate", "--average", "8", "-o", "none/p.json"], "there is no folder none"),
        (["calibrate", "--average", "8", "-o", "p.json", "--policy", "full"], "'full' keeps everything"),
        (["calibrate", "--average", "8", "-o", "p.json", "--policy", "tova:8"], "names a size"),
        (["calibrate", "--average", "8", "-o", "p.json", "--policy", "best"], "best takes a profile rather than"),
        (["calibrate", "--average", "8", "-o", "p.json", "--by", "head"], "use fade, h2o or tova-head, or a profile"),
        (
            ["calibrate", "--average", "8", "-o", "p.json", "--by", "head", "--policy", "h2o-layer"],
            "under h2o-layer they decide together",
        ),
        (
            ["calibrate", "--average", "8", "-o", "p.json", "--by", "head", "--policy", "fade", "--rounds", "1"],
            "there are no joint moves --by head; leave out --rounds",
        ),
        (["calibrate", "--average", "8", "-o", "p.json", "--grid", "8,x"], "'8,x' is not a list of whole numbers"),
        (
            ["calibrate", "./nothing", "--text", "BOOK", "--average", "8", "-o", "P", "--grid", "16"],
            "outside the grid, 16 to 16; use an average within it, or a grid that reaches 8",
        ),
        (
            ["calibrate", "MODEL", "--text", "BOOK", "--average", "8", "-o", "P", "--length", "512"],
            "than the 256 tokens",
        ),
        (["calibrate", "MODEL", "--text", "SHORT", "--average", "8", "-o", "P"], "SHORT has 4 tokens"),
        (
            ["calibrate", "MODEL", "--text", "BOOK", "--average", "8", "-o", "BOOK"],
            "is there already and is no profile",
        ),
        (
            ["calibrate", "MODEL", "--text", "BOOK", "--average", "8", "-o", "SHORT"],
            "is there already and is no profile",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(
    command: list[str], reason: str, model: str, book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "SHORT"
    short.write_text("One two three.")
    places = {"BOOK": book, "MODEL": model, "SHORT": str(short), "P": str(tmp_path / "p.json")}
    assert main([places.get(word, word) for word in command]) == 2
    output = capsys.readouterr().err.strip().splitlines()
    assert reason in output[-1]
    assert output[-1].startswith("msrnn: error: ")
    assert short.read_text() == "One two three."


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"policy": "window"}, "a profile made with another --policy (window, not tova); give another name"),
        ({"policy": None}, "a profile made with another --policy (unknown, not tova); give another name"),
        ({"for": "recall"}, "a profile made with another --for (recall, not perplexity); give another name"),
        ({"by": "head"}, "a profile made with another --by (head, not layer); give another name"),
        ({"losses": [{"average": 8}]}, '"losses" are damaged; give another name'),
        ({"losses": "none"}, '"losses" are damaged; give another name'),
        ({"dtype": "bfloat16"}, "a profile made with another --dtype (bfloat16, not float32); give another name"),
        ({"grid": [4, 8]}, "a profile made with another --grid ([4, 8], not [4, 16]); give another name"),
        ({"text": {"tokens_sha256": "0"}}, "a profile made with another --text; give another name"),
        ({"text": "a.txt"}, "a profile made with another --text; give another name"),
        ({"model": {"name": "other", "layers": 9}}, "a profile for another model; give another name"),
    ],
)
def test_a_profile_of_something_else_is_not_replaced(
    change: dict[str, object], reason: str, model: str, book: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = {"capacities": [8, 8, 8], "average": 8, "policy": "tova", "for": "perplexity", "dtype": "float32"}
    content = json.dumps(profile | {"grid": [4, 16]} | change)
    (tmp_path / "p.json").write_text(content)
    sizes = ["--length", "32", "--chunks", "1", "--grid", "4,16", "--average", "8"]
    assert main(["calibrate", model, "--text", book, *sizes, "-o", str(tmp_path / "p.json"), "-q"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert reason in line
    assert (tmp_path / "p.json").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt", "p.json"]
