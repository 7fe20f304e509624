"""TensorRT-LLM's parameter classes, made from the table of releases. Unknown arguments are refused, as pydantic's
`extra="forbid"` does, and so are the combinations that the library's own validators refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.fakes.fake_tensorrt_llm.releases import RELEASE_1_2, Alias, Deprecated, Fields, LibraryRelease, Required

DECODING_TYPES = {
    "NGramDecodingConfig": "NGram",
    "EagleDecodingConfig": "Eagle",
    "Eagle3DecodingConfig": "Eagle3",
    "MTPDecodingConfig": "MTP",
    "DraftTargetDecodingConfig": "Draft_Target",
    "AutoDecodingConfig": "AUTO",
    "PARDDecodingConfig": "PARD",
    "SADecodingConfig": "SA",
}


@dataclasses.dataclass(frozen=True)
class AliasChoices:
    choices: list[str]


@dataclasses.dataclass(frozen=True)
class Field:
    """Like pydantic's FieldInfo, with the library's marking of what is deprecated."""

    default: Any = None
    json_schema_extra: dict[str, str] | None = None
    validation_alias: AliasChoices | None = None


class StrictModel:
    """Like a pydantic model: fields with defaults, `model_fields`, ValueError for anything else."""

    model_fields: ClassVar[dict[str, Field]] = {}
    release: ClassVar[LibraryRelease]

    def __init__(self, **values: Any) -> None:
        names = {alias: name for name, field in self.model_fields.items() for alias in _names_of(name, field)}
        unknown = values.keys() - names.keys()
        if unknown:
            raise ValueError(f"{type(self).__name__}: extra inputs are not permitted: {sorted(unknown)}")
        given = {names[key]: value for key, value in values.items()}
        for name, field in self.model_fields.items():
            if field.default is Required and name not in given:
                raise ValueError(f"{type(self).__name__}: field required: {name}")
            setattr(self, name, given.get(name, field.default))
        self.validate()

    def validate(self) -> None:
        """Raises ValueError."""


def _names_of(name: str, field: Field) -> list[str]:
    return [name] if field.validation_alias is None else field.validation_alias.choices


class _KvCacheConfig(StrictModel):
    def validate(self) -> None:
        if getattr(self, "disk_cache_size", None):
            path = getattr(self, "disk_cache_path", None)
            if not path:
                raise ValueError("kv_cache_config.disk_cache_path must be set when disk_cache_size is positive")
            if not Path(path).is_dir():
                raise ValueError(f"kv_cache_config.disk_cache_path {path} does not exist or is not a directory")


class _SchedulerConfig(StrictModel):
    def validate(self) -> None:
        policy = getattr(self, "waiting_queue_policy", None)
        if policy is not None and policy not in self.release.waiting_queue_policies:
            raise ValueError(f"waiting_queue_policy: {policy} is not one of {self.release.waiting_queue_policies}")


class _CacheTransceiverConfig(StrictModel):
    backend: str | None

    def validate(self) -> None:
        if self.backend is not None and self.backend not in self.release.transceivers:
            raise ValueError(f"backend: {self.backend} is not one of {self.release.transceivers}")


class _DecodingConfig(StrictModel):
    max_draft_len: int | None
    speculative_model: str | None

    def validate(self) -> None:
        kind = self.decoding_type
        if kind in self.release.needs_draft_model and self.speculative_model is None:
            raise ValueError(f"speculative_model must be specified for {kind}")
        if kind not in ("MTP", "AUTO") and not self.max_draft_len:
            raise ValueError(f"max_draft_len must be > 0 for {kind}")

    @property
    def decoding_type(self) -> str:
        return DECODING_TYPES[type(self).__name__]


_BASES: Mapping[str, type[StrictModel]] = {
    "KvCacheConfig": _KvCacheConfig,
    "SchedulerConfig": _SchedulerConfig,
    "CacheTransceiverConfig": _CacheTransceiverConfig,
    **dict.fromkeys(DECODING_TYPES, _DecodingConfig),
}


def class_of(release: LibraryRelease, name: str, without: Iterable[str] = ()) -> type[StrictModel]:
    """A class of a release, without some of its fields."""
    fields = {key: _field(key, value) for key, value in release.classes[name].items() if key not in without}
    return type(name, (_BASES.get(name, StrictModel),), {"model_fields": fields, "release": release})


def _field(name: str, default: Any) -> Field:
    if isinstance(default, Alias):
        return Field(default.default, validation_alias=AliasChoices([name, default.name]))
    if isinstance(default, Deprecated):
        return Field(default.default, {"status": "deprecated"})
    return Field(default)


def dataclass_of(name: str, fields: Fields | Iterable[str], bases: tuple[type, ...] = ()) -> type:
    """A dataclass of keyword arguments."""
    given = fields if isinstance(fields, Mapping) else dict.fromkeys(fields)
    columns = [(key, Any, dataclasses.field(default=value)) for key, value in given.items()]
    return dataclasses.make_dataclass(name, columns, bases=bases, kw_only=True)


class KvCacheRetentionConfig:
    """It is one of C++, so its arguments are checked by type."""

    @dataclasses.dataclass
    class TokenRangeRetentionConfig:
        token_start: int
        token_end: int | None = None
        priority: int = 35
        duration_ms: Any = None

    def __init__(
        self,
        token_range_retention_configs: list[TokenRangeRetentionConfig],
        decode_retention_priority: int = 35,
        decode_duration_ms: Any = None,
    ) -> None:
        for priority in (decode_retention_priority, *(one.priority for one in token_range_retention_configs)):
            if not isinstance(priority, int) or not 0 <= priority <= 100:
                raise TypeError("incompatible constructor arguments")
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms


@dataclasses.dataclass(kw_only=True)
class SchedulingParams:
    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None


LORA_FIELDS: Fields = {
    "lora_dir": (),
    "lora_ckpt_source": "hf",
    "max_lora_rank": 64,
    "lora_target_modules": (),
    "trtllm_modules_to_hf_modules": None,
    "max_loras": None,
    "max_cpu_loras": None,
    "swap_gate_up_proj_lora_b_weight": True,
}
LoraConfig = dataclass_of("LoraConfig", LORA_FIELDS)


class LoRARequest:
    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str) -> None:
        if not Path(lora_path).exists():
            raise ValueError(f"lora_path ({lora_path}) does not exist.")
        self.lora_name = lora_name
        self.lora_int_id = lora_int_id
        self.lora_path = lora_path


@dataclasses.dataclass(kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


class _Sampling:
    max_tokens: Any
    n: int
    temperature: float | None
    top_p: float | None
    top_k: int | None

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, int):
            raise TypeError("max_tokens must be an int")
        if self.n > 1 and self.is_greedy:
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns")

    @property
    def is_greedy(self) -> bool:
        return (self.temperature, self.top_p, self.top_k) == (None, None, None)


def sampling_class(release: LibraryRelease) -> Any:
    """SamplingParams."""
    return dataclass_of("SamplingParams", release.sampling, (_Sampling,))


def handoff_class(release: LibraryRelease) -> Any:
    """DisaggregatedParams."""
    return dataclass_of("DisaggregatedParams", release.handoff)


KvCacheConfig: Any = class_of(RELEASE_1_2, "KvCacheConfig")
SamplingParams: Any = sampling_class(RELEASE_1_2)
DisaggregatedParams: Any = handoff_class(RELEASE_1_2)
"""Those of the oldest release, for tests of parts."""
