"""transformers' continuous batching has a cache of its own and drops the one it is given; a bounded one is refused.

`generate(cache_implementation="paged")` ends in `generate_batch` as well. No hook of a model or a cache is called with
the cache on that path, so the check is put into `generate_batch` itself: there it holds for copied, pickled and wrapped
models too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching import ContinuousMixin


def refuse_bounded_caches() -> None:
    """Let `generate_batch` raise if it is given a bounded cache; all other calls go on as before."""
    if not hasattr(ContinuousMixin.generate_batch, "refuses_bounded_caches"):
        ContinuousMixin.generate_batch = _checked(ContinuousMixin.generate_batch)


def _checked(generate_batch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate_batch)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("past_key_values"), "is_bounded", False):
            raise ValueError(
                "continuous batching (cache_implementation='paged', generate_batch) has a cache of its own and would "
                "drop this bounded past_key_values; leave one of the two out"
            )
        return generate_batch(*args, **kwargs)

    checked.refuses_bounded_caches = True  # type: ignore[attr-defined]
    return checked
