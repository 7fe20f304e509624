"""A stand-in for the module `tensorrt_llm`, with the quirks that its adapter must survive.

    with installed_tensorrt_llm() as fake:      # `import tensorrt_llm` now gives it
        ...
        fake.llms[-1].die(RuntimeError("CUDA error"))

`variant` says which release it is, and what else is special (see Variant); IN_1_2 and IN_NEWEST are the two shapes in
which the conformance suite runs the adapter. Names and behaviour are those of releases.py, which was written from the
library and not from the adapter; whatever else is used raises AttributeError, TypeError or ValueError, as the library
would.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

from tests.fakes.fake_tensorrt_llm import configs
from tests.fakes.fake_tensorrt_llm.llm import IN_1_2, IN_NEWEST, FakeLlm, Variant, make_llm_class
from tests.fakes.fake_tensorrt_llm.outputs import Logprob, RequestError
from tests.fakes.fake_tensorrt_llm.releases import NEWEST, RELEASE_1_2, LibraryRelease

__all__ = [
    "IN_1_2",
    "IN_NEWEST",
    "NEWEST",
    "RELEASE_1_2",
    "FakeTensorRtLlm",
    "LibraryRelease",
    "RequestError",
    "Variant",
    "installed_tensorrt_llm",
]

_ONLY_IN_LLM_ARGS = {"TorchLlmArgs", "KvCacheConnectorConfig"}


class FakeTensorRtLlm:
    """What a test holds: the LLMs that were constructed, newest last."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.llms: list[FakeLlm] = []

    @property
    def llm(self) -> FakeLlm:
        return self.llms[-1]


@contextlib.contextmanager
def installed_tensorrt_llm(variant: Variant | None = None) -> Iterator[FakeTensorRtLlm]:
    fake = FakeTensorRtLlm(variant or Variant())
    modules = _modules(fake)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield fake
    finally:
        for llm in fake.llms:
            llm.stop()
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def _modules(fake: FakeTensorRtLlm) -> dict[str, types.ModuleType]:
    variant = fake.variant
    if variant.is_stub:
        return {"tensorrt_llm": _module("tensorrt_llm", __version__="1.2.1"), **_executor()}
    release = variant.release
    classes = {
        name: configs.class_of(release, name, variant.without_llm_arguments if name == "TorchLlmArgs" else ())
        for name in release.classes
    }
    llmapi = {name: kind for name, kind in classes.items() if name not in _ONLY_IN_LLM_ARGS}
    found = {
        "tensorrt_llm": _module(
            "tensorrt_llm",
            __version__=release.name,
            LLM=make_llm_class(fake.llms, variant, classes["TorchLlmArgs"]),
            SamplingParams=configs.sampling_class(release),
        ),
        "tensorrt_llm.llmapi": _module(
            "tensorrt_llm.llmapi",
            KvCacheRetentionConfig=configs.KvCacheRetentionConfig,
            GuidedDecodingParams=configs.GuidedDecodingParams,
            DisaggregatedParams=configs.handoff_class(release),
            **llmapi,
        ),
        "tensorrt_llm.llmapi.llm_args": _module("tensorrt_llm.llmapi.llm_args", **classes),
        "tensorrt_llm.scheduling_params": _module(
            "tensorrt_llm.scheduling_params", SchedulingParams=configs.SchedulingParams
        ),
        **_executor(),
    }
    parts = release.lora_module.split(".")
    for end in range(2, len(parts)):
        path = ".".join(parts[:end])
        found[path] = _module(path)
    found[release.lora_module] = _module(release.lora_module, LoraConfig=configs.LoraConfig)
    return found


def _executor() -> dict[str, types.ModuleType]:
    return {
        "tensorrt_llm.executor": _module("tensorrt_llm.executor", LoRARequest=configs.LoRARequest),
        "tensorrt_llm.executor.result": _module("tensorrt_llm.executor.result", Logprob=Logprob),
        "tensorrt_llm.executor.utils": _module("tensorrt_llm.executor.utils", RequestError=RequestError),
    }


def _module(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    for key, value in contents.items():
        setattr(module, key, value)
    return module
