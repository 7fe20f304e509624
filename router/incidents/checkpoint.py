"""The state of a core as bytes, without the content of requests.

It is read by a kvloom whose core keeps the same state, whatever that does with it.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import deque
from types import BuiltinMethodType, MethodType, MethodWrapperType, ModuleType
from typing import Any, Final

import msgspec

from kvloom.errors import KvloomError
from router.core.core import RouterCore
from router.core.dispatch.prefill_handoffs import HandoffAbilities
from router.core.events import CachedChoice, ChoiceSpec, Request
from router.core.live import Choice, LiveRequest, StreamClient
from router.core.uncleared_output import UnclearedOutput
from router.incidents.plain_events import (
    CHARACTER,
    can_hand_over,
    error_without_text,
    wants_logprobs,
    without_content,
)

_MODULES: Final = frozenset(
    {
        "collections",
        "itertools",
        "random",
        "kvloom.adapters",
        "kvloom.backoff",
        "kvloom.enums",
        "kvloom.errors",
        "kvloom.limits_state",
        "kvloom.router_link.deferred_token_log",
        "kvloom_common.kv_share",
        "router.incidents.plain_events",
    }
)
"""Beside those of the core, which do no I/O: nothing that a state is made of can."""
_FUNCTIONS: Final = frozenset(
    {
        ("array", "_array_reconstructor"),
        ("array", "array"),
        ("copyreg", "__newobj__"),
        ("copyreg", "_reconstructor"),
        ("functools", "partial"),
        ("router.incidents.checkpoint", "_method_of"),
        ("router.incidents.checkpoint", "_new"),
        ("router.incidents.checkpoint", "_set_fields"),
        *(("builtins", name) for name in ("bytearray", "dict", "float", "frozenset", "int", "list", "range", "set")),
    }
)


def checkpoint(core: RouterCore, verdicts: deque[bool]) -> bytes:
    """`verdicts`: those of the filters that the core has, which it will share with it again. Raises PicklingError for
    what cannot be kept."""
    core.write_back()
    file = io.BytesIO()
    _Pickler(file, core).dump((core, verdicts))
    return file.getvalue()


def restore(content: bytes) -> tuple[RouterCore, deque[bool]]:
    """(the core, the verdicts that its filters will take). Raises UnpicklingError for what `checkpoint` does not write,
    and whatever a class raises that has changed."""
    return _Unpickler(io.BytesIO(content)).load()


class _Unpickler(pickle.Unpickler):
    """Knows the classes of a core only, because a bundle may come from elsewhere."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _FUNCTIONS:
            return super().find_class(module_name, global_name)
        if module_name in _MODULES or module_name.startswith(("kvloom_common.config.", "router.core.")):
            found = super().find_class(module_name, global_name)
            # Functions elsewhere can do I/O: those of configuration read and write files.
            has_right_kind = isinstance(found, type) or module_name.startswith("router.")
            if has_right_kind and getattr(found, "__module__", None) == module_name:
                return found
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not of a core")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, core: RouterCore) -> None:
        super().__init__(file, protocol=5)
        self._core = core
        self._abilities = core.config.handoffs

    def reducer_override(self, obj: Any, /) -> Any:
        if obj is self._core:
            state = {name: value for name, value in vars(obj).items() if name != "recorder"}
            return _new, (RouterCore,), state
        if isinstance(obj, _METHODS) and not isinstance(obj.__self__, type | ModuleType):
            return _method_of, (obj.__self__, obj.__name__)
        match obj:
            case Request():
                return without_content(obj, self._abilities).__reduce__()
            case ChoiceSpec():
                return msgspec.structs.replace(obj, output_token_ids=(0,) * len(obj.output_token_ids)).__reduce__()
            case CachedChoice():
                deltas = [CHARACTER * len(delta) for delta in obj.deltas]
                return msgspec.structs.replace(obj, token_ids=(0,) * len(obj.token_ids), deltas=deltas).__reduce__()
            case KvloomError():
                return error_without_text, (int(obj.reason), obj.retry_after_seconds)
            case HandoffAbilities():
                return HandoffAbilities, (can_hand_over, wants_logprobs)
            case UnclearedOutput():
                return _reduced_output(obj)
            case LiveRequest() | Choice():
                # They refer to one another: an object is known before what it refers to.
                fields = msgspec.structs.asdict(obj)
                if isinstance(obj, Choice):
                    fields["output_token_ids"] = [0] * len(obj.output_token_ids)
                else:
                    fields["ticket"] = None if obj.ticket is None else True
                return _new, (type(obj),), fields, None, None, _set_fields
            case _:
                return NotImplemented


def _method_of(owner: Any, name: str) -> Any:
    found = getattr(owner, name)
    if not isinstance(found, _METHODS) or (name.startswith("__") and name not in _SPECIAL):
        raise pickle.UnpicklingError(f"{name} is no method")
    return found


_SPECIAL: Final = frozenset({"__getitem__", "__next__"})
_METHODS: Final = (MethodType, BuiltinMethodType, MethodWrapperType)
_LIVE: Final = LiveRequest(Request("", "", "", (), "", ()), StreamClient(""), 0.0)
_BLANKS: Final[dict[type[Any], Any]] = {LiveRequest: _LIVE, Choice: Choice(_LIVE, _LIVE.client, ChoiceSpec(0, 0))}
"""Structs without values, for those that are not made by their constructors."""


def _new(kind: type[Any]) -> Any:
    blank = _BLANKS.get(kind)
    return object.__new__(kind) if blank is None else copy.copy(blank)


def _set_fields(struct: LiveRequest | Choice, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        setattr(struct, name, value)


def _reduced_output(output: UnclearedOutput) -> Any:
    state = {name: getattr(output, name) for name in UnclearedOutput.__slots__}
    state["entries"] = deque(
        ((0,) * len(token_ids), CHARACTER * len(delta), end, (None,) * len(logprobs))
        for token_ids, delta, end, logprobs in output.entries
    )
    return _new, (UnclearedOutput,), (None, state)
