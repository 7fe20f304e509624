"""Explains fields whose source says nothing, because many bodies share them and their names. Ranges are those of the
checks."""

from __future__ import annotations

from typing import Final

from kvloom.sampling import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MIN_REPETITION_PENALTY,
)

_HINT: Final = "Accepted without effect."
_OF_PART: Final = "The type of the part or block."

COMMON_FIELDS: Final = {
    # The request.
    "model": "The model, adapter or route that takes the request: one that GET /v1/models lists.",
    "models": "An extension: the models that take the request, in this order, if `model` cannot. By default none.",
    "messages": "The conversation, the oldest message first; at least one. Its history is never refused.",
    "prompt": "The text to continue: a text, a list of texts, the token ids of a text, or a list of these.",
    "system": "The system message, as a text or as blocks. By default there is none.",
    "instructions": "The system message. By default there is none.",
    "stream": "If true, the answer comes as server-sent events while it is generated. The default is false.",
    "stream_options": "Options of the stream. They go only with stream: true.",
    "n": f"How many answers are generated: 1 to {MAX_CHOICES}; the default is 1.",
    # Sampling.
    "max_tokens": (
        "The most tokens that the answer may have, at least 1. The default for chat is what the window "
        "leaves, for plain "
        "completions 16; Messages require it, and cut it to the window."
    ),
    "max_completion_tokens": "The same as `max_tokens`, which it replaces. The default is what the window leaves.",
    "max_output_tokens": (
        "The most tokens of the answer, reasoning included; at least 1. The default is what the window leaves."
    ),
    "temperature": (
        "How random the choice of tokens is: 0 (always the likeliest) to 2, in Messages to 1. The default "
        "is the model's, "
        "or else 1."
    ),
    "top_p": (
        "Tokens are drawn from the likeliest ones that together have this probability: 0 (the likeliest "
        "alone) to 1. The "
        "default is the model's, or else 1."
    ),
    "top_k": "Tokens are drawn from so many of the likeliest; 0 or -1 means all, which is the default.",
    "seed": "The same seed gives the same answer. A 64-bit integer; by default one is drawn.",
    "stop": (
        f"Texts before which the answer ends, at most {MAX_STOP_STRINGS} of 1 to {MAX_STOP_STRING_CHARS} "
        "characters. They "
        "are not looked for in reasoning. By default there are none."
    ),
    "stop_sequences": (
        f"Texts before which the answer ends, at most {MAX_STOP_STRINGS} of 1 to {MAX_STOP_STRING_CHARS} "
        "characters. By "
        "default there are none."
    ),
    "presence_penalty": "Subtracted from the logits of tokens that the answer has: -2 to 2; the default is 0.",
    "frequency_penalty": "The same for each time that the answer has them: -2 to 2; the default is 0.",
    "repetition_penalty": (
        f"Divides the logits of tokens in the prompt or the answer: {MIN_REPETITION_PENALTY:g} to "
        f"{MAX_REPETITION_PENALTY:g}; the default is 1."
    ),
    "min_p": (
        "vLLM's extension: tokens less likely than this fraction of the likeliest one are not drawn: 0 to 1; the "
        "default is 0."
    ),
    "min_tokens": "The answer does not end before it has so many tokens: 0 to `max_tokens`; the default is 0.",
    "logprobs": (
        "In chat completions true gives the answer the log-probabilities of its tokens; the default is "
        "false. In plain "
        f"completions it is a number of likeliest tokens (0 to {MAX_LOGPROBS}); by default there are none."
    ),
    "top_logprobs": (
        f"So many of the likeliest tokens have log-probabilities in the answer: 0 to {MAX_LOGPROBS}; the default is 0."
    ),
    "prediction": (
        "The text of which the answer is expected to consist, which makes it faster. By default there is none."
    ),
    # Form.
    "response_format": "The form of the answer: text (the default), a JSON object, or JSON of a schema.",
    "text": "A text.",
    "format": "The form of the text: text (the default), a JSON object, or JSON of a schema.",
    "json_schema": "With type json_schema: the schema and its name.",
    "schema": "The JSON Schema, of at most 64 KiB and 64 levels.",
    "regex": "The answer matches this regular expression, in Rust's syntax.",
    "choice": "The answer is one of these texts.",
    "grammar": "The answer conforms to this grammar, in Lark's syntax, from `start`.",
    "json_object": "True: the answer is a JSON object.",
    "guided_regex": "The same: a regular expression.",
    "guided_choice": "The same: the texts of which the answer is one.",
    "guided_grammar": "The same: a grammar in Lark's syntax.",
    # Tools.
    "tools": "The tools that the model may call. By default there are none.",
    "tool_choice": (
        "The model calls tools as it likes (auto, the default), not (none), certainly (required; "
        "any), or the one that "
        "is named."
    ),
    "parallel_tool_calls": "If true, an answer in which a call is demanded may have several. The default is false.",
    "disable_parallel_tool_use": "If true, calls after the first are left out. The default is false.",
    "function": "The function.",
    "function_call": "The predecessor of `tool_choice`, or in a message of `tool_calls`.",
    "functions": "The predecessor of `tools`.",
    "allowed_tools": "With type allowed_tools: those of the tools that may be called.",
    "mode": "Tools: auto (the model may call one of them) or required. Moderation: score or block.",
    "namespace": "The namespace of the tool.",
    "server_label": "The server of a tool that a server runs. There are none here.",
    "custom": "A tool that takes text, or a call of one.",
    "parameters": "The JSON Schema of the arguments, whose type is object.",
    "strict": "If true, calls conform to the schema also where the model is free to call. The default is false.",
    "arguments": "The arguments, as JSON.",
    # Reasoning.
    "reasoning": "How much the model thinks.",
    "thinking": "Says if the model thinks. By default its chat template decides.",
    "effort": "How much the model thinks, for chat templates that know it. By default the template decides.",
    "enabled": "Says if the model thinks. By default its chat template decides.",
    "display": "Thinking is shown (summarized, the default) or empty (omitted).",
    "output_config": "How much the model thinks, and the form of the answer.",
    "context": "Only auto, which is the default.",
    "summary": "Without effect: there are no summaries.",
    # Messages, their parts and blocks.
    "type": _OF_PART,
    "role": "Who says it: system or developer, user, assistant, or tool (for the result of a call).",
    "content": "The message, as a text or as parts.",
    "input": "The text, or the input of a call.",
    "name": "The name.",
    "description": "The purpose, which the model reads.",
    "id": "Names the call, so that its result can refer to it.",
    "tool_calls": "The calls that the assistant made.",
    "tool_call_id": "The call to which the message is the result.",
    "tool_use_id": "The call to which the block is the result.",
    "is_error": "If true, the call failed. The default is false.",
    "refusal": "The text that the assistant gave instead of an answer.",
    "data": "The data.",
    "source": "The content, or where it is.",
    "media_type": "The MIME type of the data.",
    "file_id": "The id of a stored file. Needs an orchestrator.",
    "file": "A file whose text the model reads: `file_id`, or `file_data` and `filename`. Needs an orchestrator.",
    "url": "Where it is, at an origin from which the operator lets files be fetched.",
    "title": "Its title.",
    "tool_name": "The name of a tool.",
    "image_url": "The image, which is not judged.",
    "edits": "Changes of the context. Only those of thinking are known, which chat templates make by themselves.",
    "moderation": "The safety policy judges the request and its answer, which has the results. By default not.",
    "policy": "Flagged texts are scored or blocked. By default they are scored.",
    "output": "A flagged answer is scored or blocked. By default it is scored.",
    # Hints.
    "user": _HINT,
    "metadata": _HINT,
    "store": "Accepted without effect; nothing is stored.",
    "safety_identifier": "The caller's user, for the statistics of the safety policy. By default not given.",
    "guardrails": "Rules of the safety policy that hold besides those that hold anyway. By default none.",
    "prompt_cache_retention": _HINT,
    "prompt_cache_options": _HINT,
    "cache_salt": "Accepted without effect: no other caller's requests share the cache.",
    "client_metadata": _HINT,
    "length_penalty": _HINT,
    "early_stopping": _HINT,
    "guided_decoding_backend": _HINT,
    "context_management": "Accepted without effect, with edits of thinking.",
    "include": "Further parts of the answer: message.output_text.logprobs. Others have no effect. By default none.",
    "truncation": "Only disabled, which is the default: a prompt that is too long is refused.",
    "service_tier": "Without effect but for flex. The default is auto.",
    "include_usage": "True adds a last chunk with the usage and without choices. The default is false.",
    "continuous_usage_stats": "With `include_usage`: every chunk has the usage so far. The default is false.",
    "include_obfuscation": "Only false, which is the default.",
    # Other endpoints.
    "query": "The text to which the documents are compared.",
    "documents": "Texts, or objects with a text.",
    "text_1": "A text, or several.",
    "text_2": "A text, or several; each is compared with the one of `text_1`, or with its only one.",
    "tokens": "Token ids.",
    "return_token_strs": "If true, the answer has the texts of the tokens, too. The default is false.",
    "chat_template_kwargs": "Further variables of the chat template. By default there are none.",
    "lora_name": "The name of the adapter.",
}
