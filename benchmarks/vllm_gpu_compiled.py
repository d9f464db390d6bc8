"""Which kernels Triton compiles while benchmarks/vllm_gpu.py measures: after the warm-up at start it should be none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any


class Compilations:
    """Counts from now on what Triton compiles in this process, by the kernel's name.

    Triton (3.6, 3.7) calls a hook for every new combination of argument types and constants. So a kernel that the
    cache on disk has counts too: none counted means none compiled. torch.compile's own kernels are not seen.
    """

    def __init__(self) -> None:
        self._names: Counter[str] = Counter()
        self._watched = _add_hook(lambda about: self._names.update([_name(about)]))

    def take(self) -> dict[str, int] | None:
        """What was compiled since the last call; None: there is no Triton to watch."""
        names, self._names = self._names, Counter()
        return dict(names) if self._watched else None


def _add_hook(count: Callable[[dict[str, Any]], None]) -> bool:
    """Before the hook that is there: vLLM has one, which warns."""
    try:
        from triton import knobs
    except ImportError:
        return False
    existing = knobs.runtime.jit_post_compile_hook

    def hook(**about: Any) -> Any:
        count(about)
        return None if existing is None else existing(**about)

    knobs.runtime.jit_post_compile_hook = hook
    return True


def _name(about: dict[str, Any]) -> str:
    return str(getattr(about.get("fn"), "name", "unknown"))
