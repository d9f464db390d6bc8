"""The texts that `advise` and `calibrate` measure on, as chunks of one length: options, checks, tokenization."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..system.text import read_blocks
from ..system.tokenization import stream_tokens
from .argument_parser import Parser, integer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_MIN_TOKENS = 32  # of a file
_MAX_TOKENS = 4_000_000  # of a file; the rest is not read


def add_texts(parser: Parser, *, required: bool, chunks: str) -> None:
    """--text, --length, --chunks and --batch; `chunks` describes the default of --chunks."""
    group = parser.add_argument_group("text")
    default = "" if required else " (default: Python's own documentation)"
    group.add_argument(
        "--text", action="append", required=required, metavar="FILE", help=f"a UTF-8 text file, repeatable{default}"
    )
    group.add_argument(
        "--length", type=integer(16), metavar="N", help="tokens of a chunk (default: 4096 on a GPU, else 2048)"
    )
    group.add_argument(
        "--chunks",
        type=integer(1),
        metavar="N",
        help=f"chunks at most, spread over the texts (default: {chunks})",
    )
    group.add_argument(
        "--batch", type=integer(1), metavar="N", help="chunks read at once (default: 8 on a GPU, else 1)"
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
    """[N, T] chunks, as many from each text, and the names and hashes of the texts.

    A chunk begins with the special tokens that the tokenizer puts before every text.
    """
    import torch

    from ..budgets.calibrate import chunks_of, default_text
    from ..system.tokenization import leading_special_tokens

    texts: dict[str, Iterable[str]] = {name: read_blocks(name) for name in arguments.text or []}
    texts = texts or {"Python's documentation": [default_text()]}
    tokens = {name: _tokens(tokenizer, name, text) for name, text in texts.items()}
    bos = torch.tensor(leading_special_tokens(tokenizer), dtype=torch.long)
    length = _length(arguments, model, min(map(len, tokens.values())) + len(bos))
    parts = []
    for name, ids in tokens.items():
        try:
            part = chunks_of(ids, length - len(bos), -(-count // len(tokens)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        parts.append(torch.cat([bos.expand(len(part), -1), part], 1))
    hashes = [_sha256(name) for name in arguments.text or []] or [hashlib.sha256(default_text().encode()).hexdigest()]
    return torch.cat(parts), {"names": [Path(name).name for name in texts], "sha256": hashes}


def _tokens(tokenizer: Any, name: str, text: Iterable[str]) -> list[int]:
    """The ids of one text, which must be long enough to measure on."""
    ids = list(islice(stream_tokens(tokenizer, text, special=False), _MAX_TOKENS))
    if len(ids) < _MIN_TOKENS:
        raise ValueError(f"{name} has {len(ids)} tokens; give at least {_MIN_TOKENS}, better some thousands")
    return ids


def _length(arguments: Namespace, model: PreTrainedModel, shortest: int) -> int:
    """--length; else the default, or less where a text or the model's context is shorter."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if arguments.length and context and arguments.length > context:
        raise ValueError(f"--length {arguments.length} is more than the {context} tokens the model was trained on")
    default = 4096 if model.device.type == "cuda" else 2048
    return arguments.length or min(default, context or default, shortest)


def batch_size(arguments: Namespace, model: PreTrainedModel) -> int:
    """--batch, or the default of the device."""
    return arguments.batch or (8 if model.device.type == "cuda" else 1)


def _sha256(name: str) -> str:
    with open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
