"""Chooses the build of torch. On Linux, PyPI's is the one for CUDA: 3 GB to download, and an environment of 5 GB
instead of 1.2, of which a machine without an NVIDIA GPU uses nothing."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from setup.pip_settings import is_on

CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
"""The index that PyTorch documents for its CPU builds."""
PROBE_SECONDS: Final = 3.0
CONFIGURED: Final = "default"
"""The choice of whatever the configured index has."""
CPU_OR_NONE: Final = "cpu-or-none"
"""The choice of no torch where only a large build can be had."""
_NVIDIA: Final = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


@dataclasses.dataclass(frozen=True, slots=True)
class TorchBuild:
    """An index that has the wanted build, None for the configured one, and why it was chosen."""

    index: str | None
    reason: str
    is_wanted: bool = True


def choose_build(choice: str, *, needs_cpu_index: bool, answers: bool) -> TorchBuild:
    """`choice`: "auto", "cpu", "default", "cpu-or-none" or the URL of an index. `needs_cpu_index`: the configured
    index's build would be one for a GPU that is not here. `answers`: the CPU index does."""
    if choice == CONFIGURED:
        return TorchBuild(None, "the configured index's build, as chosen")
    if choice == "cpu":
        return TorchBuild(CPU_INDEX, f"the CPU build of {CPU_INDEX}, as chosen")
    if choice == CPU_OR_NONE and not answers:
        return TorchBuild(None, f"left out, because {CPU_INDEX} does not answer", is_wanted=False)
    if choice not in ("auto", CPU_OR_NONE):
        return TorchBuild(choice, "the build of an index of your choice")
    if not needs_cpu_index and choice == "auto":
        return TorchBuild(None, "the configured index's build")
    if answers:
        return TorchBuild(CPU_INDEX, f"the CPU build of {CPU_INDEX}, because no NVIDIA GPU was found (TORCH=default)")
    missing = f"{CPU_INDEX} does not answer: the configured index's build"
    return TorchBuild(None, f"{missing}, which may be CUDA's (3 GB; docs/how-to/install.md)")


def needs_cpu_index() -> bool:
    """Return whether this is Linux without an NVIDIA GPU. Elsewhere PyPI's build is the one for the CPU."""
    has_gpu = any(Path(path).exists() for path in _NVIDIA) or shutil.which("nvidia-smi") is not None
    return platform.system() == "Linux" and not has_gpu


def index_answers(index: str, settings: Mapping[str, str], seconds: float = PROBE_SECONDS) -> bool:
    """Return whether the index has torch, asked with pip's `proxy` and `cert`, or those of the environment. Where pip
    may use no index, none is asked."""
    if is_on(settings.get("no-index", "")):
        return False
    handlers: list[urllib.request.BaseHandler] = []
    if "proxy" in settings:
        handlers.append(urllib.request.ProxyHandler({"http": settings["proxy"], "https": settings["proxy"]}))
    try:
        if "cert" in settings:
            context = ssl.create_default_context(cafile=settings["cert"])
            handlers.append(urllib.request.HTTPSHandler(context=context))
        request = urllib.request.Request(f"{index}/torch/", method="HEAD")
        with urllib.request.build_opener(*handlers).open(request, timeout=seconds):
            return True
    except (OSError, ValueError):
        return False
