"""TensorRT-LLM as this adapter uses it: the types of its objects, and the installed version's symbols and arguments.

The protocols list what the adapter uses and no more, so that the type checker rejects any other attribute;
tests/unit/shard_server/tensorrt_llm/test_names.py checks them.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from shard_server.engines.base import EngineError
from shard_server.engines.tensorrt_llm.versions import Release, release_of

MODULE: Final = "tensorrt_llm"
NO_USAGE_REPORTS: Final = "TRTLLM_NO_USAGE_STATS"
"""The environment variable that keeps newer versions from reporting their use to NVIDIA, if it is "1"."""


class Logprob(Protocol):
    logprob: float
    rank: int | None


class CompletionOutput(Protocol):
    token_ids: list[int]
    """All tokens from the first on."""
    logprobs: Sequence[Mapping[int, Logprob]] | None
    """Per token: the logprobs of the likeliest tokens and of the chosen one."""
    finish_reason: str | None
    stop_reason: int | str | None
    disaggregated_params: Any


class RequestOutput(Protocol):
    """Every iteration yields the same object."""

    outputs: Sequence[CompletionOutput]
    finished: bool
    cached_tokens: int

    def abort(self) -> None: ...
    def __aiter__(self) -> RequestOutput: ...
    async def __anext__(self) -> RequestOutput: ...


class Llm(Protocol):
    def generate_async(self, inputs: Any, **arguments: Any) -> RequestOutput: ...
    def get_kv_cache_events(self, timeout: float) -> Any: ...
    def get_stats(self, timeout: float) -> Any: ...
    def shutdown(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRtLlm:
    """The installed library. `symbol` and `build` raise EngineError for anything that this version lacks."""

    version: str
    request_error: type[Exception]
    """The exception type with which the library fails one request."""

    @property
    def release(self) -> Release:
        """The release, which tells what cannot be found out by looking at the installed version: see versions.py."""
        return release_of(self.version)

    def knows(self, path: str, argument: str) -> bool:
        """True when the class or method at `path` has the argument and uses it, as far as the installed one shows;
        otherwise, as the nearest known release does."""
        found = self.find(path)
        if found is None:
            return False
        known = argument_names(found)
        if known is None:
            name = path if path.startswith("LLM.") else path.rpartition(".")[2]
            return argument in self.release.used_arguments(name)
        return argument in known and not _is_ignored(found, argument)

    def symbol(self, path: str) -> Any:
        """The object at `path`, such as "llmapi.KvCacheConfig"."""
        found = self.find(path)
        if found is None:
            raise EngineError(f"TensorRT-LLM {self.version} has no {MODULE}.{path}")
        return found

    def find(self, path: str) -> Any | None:
        """Like `symbol`, but None if this version lacks it."""
        *owners, name = path.split(".")
        try:
            owner = importlib.import_module(".".join((MODULE, *owners)))
        except ImportError:
            owner = self.find(".".join(owners)) if owners else None
        return getattr(owner, name, None)

    def arguments_of(self, path: str) -> frozenset[str] | None:
        """The argument names of a class; None if they cannot be found out."""
        return argument_names(self.symbol(path))

    def build(self, path: str, option: str, **arguments: Any) -> Any:
        """An instance of the class at `path`; `option` names the configuration key that requires it."""
        known = self.arguments_of(path)
        for name in arguments:
            if known is not None and name not in known:
                raise EngineError(f"{option}: TensorRT-LLM {self.version}'s {path} has no {name}")
        try:
            return self.symbol(path)(**arguments)
        except (ValueError, TypeError) as error:
            raise EngineError(f"{option}: TensorRT-LLM {self.version} refuses it: {error}") from error


def load_tensorrt_llm() -> TensorRtLlm:
    """Import the library. It takes long, so do not call it on the event loop. It reports no usage, unless the
    environment says so. Raises EngineError."""
    os.environ.setdefault(NO_USAGE_REPORTS, "1")
    try:
        module = importlib.import_module(MODULE)
        request_error = importlib.import_module(f"{MODULE}.executor.utils").RequestError
    except Exception as error:  # importing loads CUDA libraries, which raise errors of their own
        raise EngineError(f"TensorRT-LLM cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, "LLM"):
        raise EngineError("the installed tensorrt_llm has no LLM: it is the index's stub, not the library")
    return TensorRtLlm(version=str(module.__version__), request_error=request_error)


def argument_names(function: Any) -> frozenset[str] | None:
    """The argument names of a class (of pydantic, a dataclass or any other) or a function; None if it accepts any."""
    fields = getattr(function, "model_fields", None)
    if isinstance(fields, Mapping):
        aliases = (getattr(field, "validation_alias", None) for field in fields.values())
        others = (getattr(alias, "choices", ()) for alias in aliases)
        return frozenset(fields).union(name for names in others for name in names if isinstance(name, str))
    if dataclasses.is_dataclass(function):
        return frozenset(field.name for field in dataclasses.fields(function) if field.init)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _is_ignored(model: Any, name: str) -> bool:
    """True when a field of a pydantic model is deprecated, in the library's own marking, or set by the library
    itself."""
    fields = getattr(model, "model_fields", {})
    field = fields.get(name) if isinstance(fields, Mapping) else None
    extra = getattr(field, "json_schema_extra", None)
    is_deprecated = isinstance(extra, Mapping) and extra.get("status") == "deprecated"
    return is_deprecated or getattr(field, "init", None) is False
