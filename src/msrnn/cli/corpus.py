"""The texts that `advise` and `calibrate` measure on, as chunks of one length: options, reading, refusals."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..system.text import read_blocks
from ..system.tokenization import stream_tokens
from . import options

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_LEAST = 32
_MOST = 4_000_000  # tokens of one file that are looked at


def add_texts(parser: options.Parser, *, required: bool, chunks: str) -> None:
    group = parser.add_argument_group("text")
    default = "" if required else " (default: Python's own documentation)"
    group.add_argument(
        "--text", action="append", required=required, metavar="FILE", help=f"a UTF-8 text file, repeatable{default}"
    )
    group.add_argument(
        "--length", type=options.whole(16), metavar="N", help="tokens of a chunk (default: 4096 on a GPU, else 2048)"
    )
    group.add_argument(
        "--chunks",
        type=options.whole(1),
        metavar="N",
        help=f"chunks at most, spread over the texts (default: {chunks})",
    )
    group.add_argument(
        "--batch", type=options.whole(1), metavar="N", help="chunks read at once (default: 8 on a GPU, else 1)"
    )


def check_texts(arguments: Namespace) -> None:
    """Refuse files that are not there, before a model is loaded."""
    for name in arguments.text or []:
        if Path(name).is_dir():
            raise ValueError(f"--text {name} is a folder; give text files")
        if not Path(name).is_file():
            raise ValueError(f"there is no file {name}; check the name")
        next(read_blocks(name), None)  # what is not text says so now


def read_chunks(
    arguments: Namespace, model: PreTrainedModel, tokenizer: Any, count: int
) -> tuple[Tensor, dict[str, Any]]:
    """[N, T] chunks, as many from each text, and where they are from.

    A chunk begins with what the tokenizer puts before every text, if anything.
    """
    import torch

    from ..budgets.calibrate import chunks_of, default_text
    from ..system.tokenization import leading_special_tokens

    texts: dict[str, Iterable[str]] = {name: read_blocks(name) for name in arguments.text or []}
    texts = texts or {"Python's documentation": [default_text()]}
    read = {name: list(islice(stream_tokens(tokenizer, text, special=False), _MOST)) for name, text in texts.items()}
    name, fewest = min(((name, len(ids)) for name, ids in read.items()), key=lambda found: found[1])
    if fewest < _LEAST:
        raise ValueError(f"{name} has {fewest} tokens; give at least {_LEAST}, better some thousands")
    before = torch.tensor(leading_special_tokens(tokenizer), dtype=torch.long)
    length = _length(arguments, model, min(map(len, read.values())) + len(before))
    parts = []
    for name, ids in read.items():
        try:
            part = chunks_of(ids, length - len(before), -(-count // len(read)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        parts.append(torch.cat([before.expand(len(part), -1), part], 1))
    shas = [_sha256(name) for name in arguments.text or []] or [hashlib.sha256(default_text().encode()).hexdigest()]
    return torch.cat(parts), {"names": [Path(name).name for name in texts], "sha256": shas}


def _length(arguments: Namespace, model: PreTrainedModel, shortest: int) -> int:
    """What was asked for; else the default, or less where a text or the model's context is shorter."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if arguments.length and context and arguments.length > context:
        raise ValueError(f"--length {arguments.length} is more than the {context} tokens the model was trained on")
    default = 4096 if model.device.type == "cuda" else 2048
    return arguments.length or min(default, context or default, shortest)


def batch_of(arguments: Namespace, model: PreTrainedModel) -> int:
    return arguments.batch or (8 if model.device.type == "cuda" else 1)


def _sha256(name: str) -> str:
    with open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
