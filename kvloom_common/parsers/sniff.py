"""Finds the families of parsers that a model needs, from its chat template.

A template shows the model its own earlier calls and reasoning, so it contains their markers. The first rule that fits
decides; `kvloom.toml` can name the families instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from kvloom_common.parsers.spec import ParserSpec

_OPENINGS: Final = ("<think>", "◁think▷", "[THINK]")
# The generation prompt's last string ends inside the reasoning, e.g. '<|im_start|>assistant\n<think>\n'.
_ENDS_IN_REASONING: Final = re.compile(r"<think>(?:\\n|\s)*['\"]\s*-?\}\}")
_MENTIONS_TOOLS: Final = re.compile(r"\{[%{][^}]*\btools\b")


def sniff(chat_template: str, special_tokens: Sequence[str] = (), model_type: str = "") -> ParserSpec:
    """The families of a model. `model_type` is that of config.json, e.g. "llama4"."""
    known = frozenset(special_tokens)
    if "<|channel|>" in chat_template or model_type == "gpt_oss":
        return ParserSpec(tools="harmony", reasoning="harmony")
    tools = _tool_family(chat_template, known, model_type)
    reasoning = _reasoning_family(chat_template)
    return ParserSpec(tools=tools, reasoning=reasoning, starts_in_reasoning=reasoning == "deepseek_r1")


def starts_in_reasoning(spec: ParserSpec, prompt: str) -> bool:
    """True when a rendered prompt ends inside the reasoning, which often depends on the request (thinking on or
    off)."""
    end = prompt.rstrip()
    return bool(spec.reasoning) and spec.reasoning != "harmony" and end.endswith(_OPENINGS)


def _tool_family(template: str, special_tokens: frozenset[str], model_type: str) -> str | None:
    for family, fits in (
        ("kimi_k2", "<|tool_calls_section_begin|>" in template),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>" in template and "```json" in template),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>" in template),
        ("mistral", "[TOOL_CALLS]" in template or "[AVAILABLE_TOOLS]" in template),
        ("qwen3_coder", "<function=" in template and "<parameter=" in template),
        ("glm45", "<arg_key>" in template),
        ("granite", "<|tool_call|>" in template and "<|start_of_role|>" in template),
        ("phi4", "functools" in template or "<|/tool_call|>" in special_tokens),
        ("hermes", "<tool_call>" in template),
        ("llama4_pythonic", "<|python_start|>" in template or model_type.startswith("llama4")),
        ("llama3_json", "<|python_tag|>" in template or '"parameters": ' in template),
        ("json", _MENTIONS_TOOLS.search(template) is not None),
    ):
        if fits:
            return family
    return None


def _reasoning_family(template: str) -> str | None:
    if "◁think▷" in template:
        return "kimi"
    if "[THINK]" in template:
        return "mistral"
    if "Here is my thought process:" in template or ("<think>" in template and "<response>" in template):
        return "granite"
    if "</think>" not in template and "<think>" not in template:
        return None
    generation = template.rpartition("add_generation_prompt")[2]
    always = _ENDS_IN_REASONING.search(generation) is not None and "</think>" not in generation
    return "deepseek_r1" if always else "qwen3"
