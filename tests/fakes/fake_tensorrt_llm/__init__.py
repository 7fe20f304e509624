"""A stand-in for the module `tensorrt_llm`, 1.2.1, with the quirks that its adapter must survive.

    with installed_tensorrt_llm() as fake:      # `import tensorrt_llm` now gives it
        ...
        fake.llms[-1].die(RuntimeError("CUDA error"))

`variant` changes what the version knows (see Variant). Names are the real ones; whatever else is used raises
AttributeError, TypeError or ValueError, as the library would.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

from tests.fakes.fake_tensorrt_llm import configs
from tests.fakes.fake_tensorrt_llm.llm import FakeLlm, Variant, make_llm_class
from tests.fakes.fake_tensorrt_llm.outputs import RequestError
from tests.fakes.fake_tensorrt_llm.transfers import NewDisaggregatedParams

__all__ = ["FakeTensorRtLlm", "RequestError", "Variant", "installed_tensorrt_llm"]


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
    llm_args = configs.llm_args_class(variant.without_llm_arguments)
    llmapi = {
        "KvCacheConfig": configs.KvCacheConfig,
        "CudaGraphConfig": configs.CudaGraphConfig,
        "CacheTransceiverConfig": configs.CacheTransceiverConfig,
        "NGramDecodingConfig": configs.NGramDecodingConfig,
        "EagleDecodingConfig": configs.EagleDecodingConfig,
        "MTPDecodingConfig": configs.MTPDecodingConfig,
        "DraftTargetDecodingConfig": configs.DraftTargetDecodingConfig,
        "GuidedDecodingParams": configs.GuidedDecodingParams,
        "DisaggregatedParams": NewDisaggregatedParams if variant.is_new else configs.DisaggregatedParams,
    }
    if variant.is_new:
        llmapi["Eagle3DecodingConfig"] = configs.Eagle3DecodingConfig
    return {
        "tensorrt_llm": _module(
            "tensorrt_llm",
            __version__="1.3.0" if variant.is_new else "1.2.1",
            LLM=make_llm_class(fake.llms, variant, llm_args),
            SamplingParams=configs.SamplingParams,
        ),
        "tensorrt_llm.llmapi": _module("tensorrt_llm.llmapi", **llmapi),
        "tensorrt_llm.llmapi.llm_args": _module(
            "tensorrt_llm.llmapi.llm_args",
            TorchLlmArgs=llm_args,
            KvCacheConnectorConfig=configs.KvCacheConnectorConfig,
        ),
        "tensorrt_llm.lora_helper": _module("tensorrt_llm.lora_helper", LoraConfig=configs.LoraConfig),
        **_executor(),
    }


def _executor() -> dict[str, types.ModuleType]:
    return {
        "tensorrt_llm.executor": _module("tensorrt_llm.executor", LoRARequest=configs.LoRARequest),
        "tensorrt_llm.executor.utils": _module("tensorrt_llm.executor.utils", RequestError=RequestError),
    }


def _module(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    for key, value in contents.items():
        setattr(module, key, value)
    return module
