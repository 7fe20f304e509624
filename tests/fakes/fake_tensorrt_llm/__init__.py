"""A stand-in for the module `tensorrt_llm`, with the quirks that its adapter must survive.

    with installed_tensorrt_llm() as fake:      # `import tensorrt_llm` now gives it
        ...
        fake.llms[-1].die(RuntimeError("CUDA error"))

`variant` says which release it is, and what else is special (see Variant); IN_1_2 and IN_NEWEST are the two shapes in
which the conformance suite runs the adapter. Names are the real ones; whatever else is used raises
AttributeError, TypeError or ValueError, as the library would.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator

from tests.fakes.fake_tensorrt_llm import configs
from tests.fakes.fake_tensorrt_llm.llm import IN_1_2, IN_NEWEST, FakeLlm, Variant, make_llm_class
from tests.fakes.fake_tensorrt_llm.outputs import Logprob, RequestError
from tests.fakes.fake_tensorrt_llm.transfers import NewDisaggregatedParams

__all__ = ["IN_1_2", "IN_NEWEST", "FakeTensorRtLlm", "RequestError", "Variant", "installed_tensorrt_llm"]


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
    llm_args = configs.llm_args_class(release, variant.without_llm_arguments)
    llmapi: dict[str, type] = {
        model.__name__: configs.of_release(model, release)
        for model in (
            configs.KvCacheConfig,
            configs.CudaGraphConfig,
            configs.CacheTransceiverConfig,
            configs.SchedulerConfig,
            configs.NGramDecodingConfig,
            configs.EagleDecodingConfig,
            configs.Eagle3DecodingConfig,
            configs.MTPDecodingConfig,
            configs.DraftTargetDecodingConfig,
        )
        if release.has_symbol(f"llmapi.{model.__name__}")
    }
    llmapi["KvCacheRetentionConfig"] = configs.KvCacheRetentionConfig
    llmapi["GuidedDecodingParams"] = configs.GuidedDecodingParams
    knows_ids = "disagg_request_id" in release.arguments("DisaggregatedParams")
    llmapi["DisaggregatedParams"] = NewDisaggregatedParams if knows_ids else configs.DisaggregatedParams
    return {
        "tensorrt_llm": _module(
            "tensorrt_llm",
            __version__=release.name,
            LLM=make_llm_class(fake.llms, variant, llm_args),
            SamplingParams=configs.SamplingParams,
        ),
        "tensorrt_llm.llmapi": _module("tensorrt_llm.llmapi", **llmapi),
        "tensorrt_llm.llmapi.llm_args": _module(
            "tensorrt_llm.llmapi.llm_args",
            TorchLlmArgs=llm_args,
            KvCacheConnectorConfig=configs.of_release(configs.KvCacheConnectorConfig, release),
        ),
        "tensorrt_llm.scheduling_params": _module(
            "tensorrt_llm.scheduling_params", SchedulingParams=configs.SchedulingParams
        ),
        "tensorrt_llm.lora_helper": _module("tensorrt_llm.lora_helper", LoraConfig=configs.LoraConfig),
        **_executor(),
    }


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
