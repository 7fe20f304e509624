"""Decides which fields of a body count: those that are known, and of the others none that would change the answer.

The rule for a field that is not known, at the top of a body or in one of its options:

1. One that asks for nothing (null, false, 0, or empty) passes.
2. One that is listed as unsupported, or whose name is nearly that of a known one, or is about what the model writes,
   is refused by name.
3. All others are hints of clients, caches, telemetry, billing and the like. They pass, and are counted.

In strict mode all are refused that ask for something. The fields of messages, parts and calls are no parameters: they
are history, in which nothing is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from edge_http.formatting.decoding import decode_body
from kvloom.errors import KvloomError, unsupported

_T = TypeVar("_T")


class Refused(NamedTuple):
    """Why a field is refused that nothing but its name tells to be one of those that would change the answer."""

    off: tuple[Any, ...] = ()
    """The values, besides those that ask for nothing, that mean "off"."""
    why: str = ""
    """The reason, which follows on "NAME is not supported"."""
    is_default: bool = False
    """True when what the field asks for happens anyway, so that false is refused, and true passes."""

    def error(self, field: str) -> KvloomError:
        return unsupported(f"{field} is not supported{self.why}.", field)


MAX_SHOWN_CHARS: Final = 64
_GUESS_CUTOFF: Final = 0.8
_NOTHING: Final = (b"null", b"false", b"0", b"0.0", b'""', b"[]", b"{}")
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_HINTS: Final = frozenset(
    re.findall(
        r"[a-z]+",
        "beta betas billing cache cached caching client cost debug internal log logging metadata obfuscation "
        "passthrough routing safety session stats telemetry timeout trace tracing tracking usage",
    )
)
"""Words in the names of fields that tell a server something, and ask the model for nothing."""
_WITHOUT_EFFECT: Final = frozenset(("cache", "client", "identifier", "metadata", "store", "user"))
"""Words in the names of known fields that a caller who has misspelt a name does not mean."""
_OF_ANSWERS: Final = frozenset(
    re.findall(
        r"[a-z]+",
        "adapter additional audio bad banned beam beams best bias candidates choices cutoff document documents dry "
        "dynatemp ebnf echo effort entropy file files format function functions grammar guidance guide guided image "
        "images instruction instructions length logit logits logprob logprobs lora max min mirostat modalities n "
        "penalty plugin plugins predict prediction reasoning regex repeat repetition sampler samplers sampling schema "
        "search seed stop structural structured suffix system temperature template tfs thinking tokens tool tools top "
        "typical verbosity video words xtc",
    )
)
"""Words in the names of fields that would change what the model reads or writes."""
_SYNONYMS: Final = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "system_prompt": "messages",
    "random_seed": "seed",
}
"""Names of other APIs for what this one names otherwise."""


class FieldRules(Protocol):
    """Says what to do with fields that are not known."""

    def is_strict(self, headers: Mapping[str, str], /) -> bool:
        """Returns True when all of them are refused, of a request with these headers."""
        ...

    def note(self, fields: Sequence[str], /) -> None:
        """These were left out."""
        ...


class _Lenient:
    def is_strict(self, _headers: Mapping[str, str], /) -> bool:
        return False

    def note(self, _fields: Sequence[str], /) -> None:
        pass


LENIENT: Final[FieldRules] = _Lenient()
NO_HEADERS: Final[Mapping[str, str]] = {}


class BodyReader(Generic[_T]):
    """Decodes bodies of one type."""

    def __init__(
        self, kind: type[_T], refused: Mapping[str, Refused] | None = None, mend: Callable[[bytes], bytes] | None = None
    ) -> None:
        """`kind` and its options forbid unknown fields. `mend` replaces parts of a body that cannot be decoded, where
        that is better than to refuse it."""
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._refused: Mapping[str, Refused] = refused or {}
        self._mend = mend
        self._known: _Known | None = None
        """Made for the first body that needs it."""

    def read(self, raw: bytes, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS) -> _T:
        """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
        try:  # nearly all bodies have known fields alone
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._read_slowly(raw, rules, headers)

    def _read_slowly(self, raw: bytes, rules: FieldRules, headers: Mapping[str, str]) -> _T:
        ignored: list[str] = []
        if self._known is None:
            self._known = _known_fields(self._kind)
        pruned = self._pruned(raw, self._known, "", ignored, is_strict=rules.is_strict(headers))
        try:
            body = self._decoder.decode(pruned)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            body = decode_body(self._decoder, pruned if self._mend is None else self._mend(pruned))
        if ignored:
            rules.note(ignored)
        return body

    def _pruned(self, raw: bytes, known: _Known, at: str, ignored: list[str], *, is_strict: bool) -> bytes:
        """The object without its unknown fields; what is no object is returned as it is, to be refused as such. Raises
        KvloomError (UNSUPPORTED_PARAMETER)."""
        try:
            given = _OBJECT.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return raw
        kept: dict[str, msgspec.Raw] = {}
        for name, value in given.items():
            if name not in known:
                self._check(f"{at}{name}", bytes(value), known, is_strict=is_strict)
                ignored.append(f"{at}{name}")
                continue
            within = known[name]
            if within is not None:
                value = msgspec.Raw(self._pruned(bytes(value), within, f"{at}{name}.", ignored, is_strict=is_strict))
            kept[name] = value
        return msgspec.json.encode(kept)

    def _check(self, field: str, value: bytes, known: _Known, *, is_strict: bool) -> None:
        """Raise KvloomError (UNSUPPORTED_PARAMETER) for a field that cannot be left out."""
        refused = self._refused.get(field)
        if value in _NOTHING and not (refused is not None and refused.is_default and value == b"false"):
            return
        if refused is not None:
            if _decoded(value) in refused.off or (refused.is_default and value == b"true"):
                return
            raise refused.error(field)
        name = field.rpartition(".")[2]
        words = {word.lower() for word in _WORD.findall(name)}
        if words & _HINTS and not is_strict:
            return
        guess = _guess(name, known)
        if guess is None and not is_strict and not words & _OF_ANSWERS:
            return
        raise _unknown(field, guess)


def _unknown(field: str, guess: str | None) -> KvloomError:
    shown = field if len(field) <= MAX_SHOWN_CHARS else field[:MAX_SHOWN_CHARS] + "…"
    hint = f" Did you mean {guess}?" if guess is not None else ""
    return unsupported(f"{shown} is not a known parameter.{hint}", shown)


def _guess(name: str, known: _Known) -> str | None:
    """The known field that a caller may have meant."""
    plain = "_".join(_WORD.findall(name)).lower()
    synonym = _SYNONYMS.get(plain)
    if synonym in known:
        return synonym
    candidates = [one for one in known if not set(one.split("_")) & _WITHOUT_EFFECT]
    return next(iter(difflib.get_close_matches(plain, candidates, 1, _GUESS_CUTOFF)), None)


def _decoded(value: bytes) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return value


_Known = dict[str, Any]
"""The known fields by name, each with those of the options that it holds; None: it holds no options."""
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _known_fields(kind: type) -> _Known:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return _fields_of(info)


def _fields_of(info: msgspec.inspect.StructType) -> _Known:
    return {field.encode_name: _options_of(field.type) for field in info.fields}


def _options_of(info: msgspec.inspect.Type) -> _Known | None:
    """The fields of the struct of options that a value may be."""
    kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    structs = [kind for kind in kinds if isinstance(kind, msgspec.inspect.StructType)]
    if len(structs) != 1 or not structs[0].cls.__struct_config__.forbid_unknown_fields:
        return None
    return _fields_of(structs[0])
