"""OpenAI parameters that kvloom does not support. They are listed by name, so that each is rejected and never ignored.

For every such field, the tables give the values besides null that request nothing and are therefore accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvloom.errors import unsupported

Harmless = Mapping[str, Sequence[Any]]
"""Maps each field name to the values that mean "off"."""

_BOTH: Final[Harmless] = {
    "store": (False,),
}

CHAT: Final[Harmless] = {
    **_BOTH,
    "audio": (),
    "modalities": (["text"], []),
    "moderation": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

COMPLETION: Final[Harmless] = {
    **_BOTH,
    "best_of": (1,),
    "suffix": ("",),
}


def refuse(body: object, harmless: Harmless, at: str = "") -> None:
    """Raise KvloomError (UNSUPPORTED_PARAMETER) for the first field that requests an unsupported feature.

    `at` prefixes the field's name, e.g. "messages[2].".
    """
    for name, values in harmless.items():
        value = getattr(body, name, None)  # a plain body has no such fields
        if value is not None and not any(type(value) is type(off) and value == off for off in values):
            field = at + name
            raise unsupported(f"{field} is not supported.", field)
