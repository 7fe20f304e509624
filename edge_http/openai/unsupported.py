"""Parameters of OpenAI and of other servers that would change the answer and that kvloom does not support, where their
names do not tell it (edge_http/formatting/body_fields.py)."""

from __future__ import annotations

from typing import Final

from edge_http.formatting.body_fields import Refused

_BOTH: Final = {
    "add_special_tokens": Refused(),
    "allowed_token_ids": Refused(),
    "best_of": Refused((1,)),
    "chat_template": Refused(),
    "echo": Refused(),
    "include_stop_str_in_output": Refused(),
    "include_reasoning": Refused(is_default=True),
    "kv_transfer_params": Refused(),
    "return_hidden_states": Refused(),
    "return_token_ids": Refused(),
    "return_tokens_as_token_ids": Refused(),
    "separate_reasoning": Refused(is_default=True),
    "stream_reasoning": Refused(is_default=True),
    "typical_p": Refused((1, 1.0)),
    "use_beam_search": Refused(),
}

CHAT: Final = {
    **_BOTH,
    "audio": Refused(),
    "modalities": Refused((["text"],)),
    "web_search_options": Refused(),
}

COMPLETION: Final = {
    **_BOTH,
    "moderation": Refused(),
    "suffix": Refused(),
}
