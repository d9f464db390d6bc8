"""SentencePiece's BPE from the tokens of a GGUF file, where transformers (5.17) builds another tokenizer from them.

It reads Gemma's tokens as Unigram, whose best path joins other pieces than BPE does: most words fall apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_NORMAL, _USER_DEFINED = 1, 4  # types of tokens in a GGUF file


def is_unigram(tokenizer: Any) -> bool:
    from tokenizers.models import Unigram

    return isinstance(tokenizer.backend_tokenizer.model, Unigram)


def restore_bpe(tokenizer: Any, tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> None:
    """Put the BPE of these tokens into the tokenizer. A score is minus the rank of the merge that makes the token."""
    from tokenizers import AddedToken
    from tokenizers.models import BPE

    ids = {token: number for number, token in enumerate(tokens)}
    normal = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    backend = tokenizer.backend_tokenizer
    backend.model = BPE(ids, merges(normal), unk_token=tokenizer.unk_token, fuse_unk=True, byte_fallback=True)
    whole = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=True) for token in whole])  # runs of spaces or newlines


def merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens that join into a third, the one with the highest score first."""
    pairs = [(token, cut) for token in scores for cut in range(1, len(token)) if _joins(token, cut, scores)]
    pairs.sort(key=lambda pair: (-scores[pair[0]], -pair[1]))
    return [(token[:cut], token[cut:]) for token, cut in pairs]


def _joins(token: str, cut: int, scores: Mapping[str, float]) -> bool:
    return token[:cut] in scores and token[cut:] in scores
