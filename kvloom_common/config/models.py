"""The configuration of models and their adapters."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from kvloom_common.config.section import AT_START, FOLLOWED, FilePath, ModelPath, PositiveInt, Section


class GenerationDefaults(Section):
    """How answers are generated where a request does not say it. What is not set here either has OpenAI's default."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    max_tokens: PositiveInt | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """With one, requests that name no seed, such as all of the Responses and Messages APIs, repeat their answers."""


ADAPTER_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._/@-]{0,127}$"
"""Without ':', which separates a model's name from its adapter's."""


AdapterName = Annotated[str, Meta(pattern=ADAPTER_NAME)]


class AdapterConfig(Section):
    """A LoRA adapter of a model (docs/how-to/models.md)."""

    name: AdapterName
    path: FilePath = ""
    """The directory with adapter_config.json and adapter_model.safetensors. The simulated engine needs none."""


class ModelConfig(Section):
    """A model that the fabric serves (docs/how-to/models.md)."""

    name: str = "smollm2-135m-instruct"
    """The name by which clients request the model."""
    path: Annotated[ModelPath, AT_START] = ""
    """The directory with config.json, *.safetensors, tokenizer.json and chat template. Empty: `kvloom up` looks `name`
    up, among its built-in models and in `kvloom models list`."""
    version: str = ""
    """The version that clients see. Empty: that of the registered model."""
    sha256: Annotated[str, AT_START] = ""
    """The checksum of the model's files (`kvloom models add` prints it), checked before they are loaded. Empty: it is
    not checked."""
    aliases: list[str] = []
    """Further names by which clients may request the model."""
    succeeds: str = ""
    """The model that this one is to replace, whose name and aliases it may have as aliases: they stand for it when that
    one is served no more. `kvloom models rollout` sets it."""
    owned_by: str = "kvloom"
    """The organisation that GET /v1/models names."""
    tool_parser: str = "auto"
    """How the model writes tool calls: the name of a family (docs/reference/tool-calls.md), "none", or "auto": what its
    chat template shows."""
    reasoning_parser: str = "auto"
    """How the model writes its reasoning: the name of a family, "none", or "auto": what its chat template shows."""
    adapters: Annotated[list[AdapterConfig], FOLLOWED] = []
    """The LoRA adapters that its shards have from the start."""
    max_loaded_adapters: Annotated[int, Meta(ge=0, le=1024)] = 8
    """How many adapters a shard has in memory at the same time; the least recently used one goes. 0: none can be
    registered."""
    max_adapter_rank: Annotated[int, Meta(ge=1, le=512)] = 64
    """Adapters of a larger rank are refused."""
    defaults: GenerationDefaults = msgspec.field(default_factory=GenerationDefaults)
    reads_generation_config: bool = True
    """True takes what `defaults` does not say from the model's generation_config.json, as vLLM does."""
    shard: dict[str, Any] = {}
    """The settings of [shard] that differ for the shards of this model, e.g. `num_shards` or `engine`."""
