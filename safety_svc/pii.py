"""The kind of rule that finds personal data: what looks like it by its form, and is valid by its check digits.

[[rules]]
name = "card"
kind = "pii"
finds = "card"                         # email, phone, card, iban, address, key, or national
national = ["us.ssn", "de.idnr"]       # with finds = "national": modules of python-stdnum
mode = "mask"
"""

from __future__ import annotations

import importlib
import ipaddress
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import re2

from kvloom_common.plugins import PluginError

_FORMS: Final[Mapping[str, tuple[str, int]]] = {
    "email": (r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,4}[A-Za-z]{2,24}", 345),
    "phone": (r"\+[0-9][0-9 ()./-]{5,20}[0-9]", 23),
    "card": (r"\b[0-9](?:[ -]?[0-9]){12,18}\b", 38),
    "iban": (r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}\b", 65),
    "address": (
        r"\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b|(?:\b[0-9A-Fa-f]{1,4}|:):(?:[0-9A-Fa-f]{0,4}:){0,6}[0-9A-Fa-f]{1,4}\b",
        45,
    ),
    "key": (
        r"\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[0-9A-Za-z]{36}\b|\bgithub_pat_[0-9A-Za-z_]{60,90}|\bglpat-[0-9A-Za-z_-]{20}\b"
        r"|\bxox[abprs]-[0-9A-Za-z-]{10,80}|\bsk-[0-9A-Za-z_-]{20,180}|\bAIza[0-9A-Za-z_-]{35}"
        r"|\beyJ[0-9A-Za-z_-]{10,800}\.eyJ[0-9A-Za-z_-]{10,1000}\.[0-9A-Za-z_-]{10,800}",
        3300,
    ),
    "national": (r"\b[0-9A-Z](?:[ ./-]?[0-9A-Z]){6,19}\b", 40),
}
"""By what is found: how it looks, in RE2's syntax, and the most characters that it has."""
_SPACE: Final = " "


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    finds: str
    national: tuple[str, ...] = ()


class PiiKind:
    """Finds one kind of personal data (RuleKind)."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises PluginError."""
        try:
            own = msgspec.convert(settings, _Settings)
        except msgspec.ValidationError as error:
            raise PluginError(str(error)) from error
        if own.finds not in _FORMS:
            raise PluginError(f"finds: there is no {own.finds!r}; there are {', '.join(_FORMS)}")
        if bool(own.national) != (own.finds == "national"):
            raise PluginError("national names modules of python-stdnum, with finds = 'national' and only then")
        form, self.max_length = _FORMS[own.finds]
        self._form: Any = re2.compile(form)
        self._is_valid = _validity(own)

    def find(self, text: str, start: int) -> tuple[int, int] | None:
        """See RuleKind."""
        while (match := self._form.search(text, start)) is not None:
            for end in _ends(text, match.start(), match.end()):
                passage = text[match.start() : end]
                if (end == match.end() or self._form.fullmatch(passage)) and self._is_valid(passage):
                    return match.start(), end
            start = match.start() + 1
        return None


def _ends(text: str, start: int, end: int) -> Iterator[int]:
    """The ends that a passage may have, the last one first: words may follow a number that look like a part of it."""
    yield end
    while (end := text.rfind(_SPACE, start, end)) > start:
        yield end


def _validity(settings: _Settings) -> Callable[[str], bool]:
    """Libraries are imported for the rules that need them."""
    match settings.finds:
        case "card":
            return _card_validity()
        case "iban":
            return importlib.import_module("stdnum.iban").is_valid
        case "phone":
            return _phone_validity()
        case "address":
            return _is_address
        case "national":
            return _national_validity(settings.national)
        case _:
            return lambda _: True


def _card_validity() -> Callable[[str], bool]:
    luhn = importlib.import_module("stdnum.luhn")
    return lambda text: luhn.is_valid("".join(filter(str.isdigit, text)))


def _phone_validity() -> Callable[[str], bool]:
    phonenumbers = importlib.import_module("phonenumbers")

    def is_valid(text: str) -> bool:
        try:
            return phonenumbers.is_valid_number(phonenumbers.parse(text))
        except phonenumbers.NumberParseException:
            return False

    return is_valid


def _national_validity(names: tuple[str, ...]) -> Callable[[str], bool]:
    try:
        modules = [importlib.import_module(f"stdnum.{name}") for name in names if name.replace(".", "").isalnum()]
        checks = [module.is_valid for module in modules]
    except (ImportError, AttributeError) as error:
        raise PluginError(f"national: {error}") from error
    return lambda text: any(check(text) for check in checks)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
