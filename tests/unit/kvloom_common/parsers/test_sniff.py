"""The families of a model are found in its chat template."""

from __future__ import annotations

import pytest

from kvloom_common.parsers import registry
from kvloom_common.parsers.sniff import sniff, starts_in_reasoning
from kvloom_common.parsers.spec import ParserSpec

HERMES = (
    "{%- if tools %}# Tools ... within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{%- endif %}'
)
QWEN3_END = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
THINKING_END = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
R1 = (
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'}}"
    "{% if '</think>' in content %}{% endif %}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
V31 = (
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments + '<｜tool▁call▁end｜>'}}"
    "{%- if add_generation_prompt %}{{'<｜Assistant｜>'}}"
    "{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}{%- endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "special_tokens", "model_type", "spec"),
    [
        (HERMES, (), "qwen2", ParserSpec("hermes")),
        (HERMES + QWEN3_END, (), "qwen3", ParserSpec("hermes", "qwen3")),
        (HERMES + "</think>" + THINKING_END, (), "qwen3", ParserSpec("hermes", "deepseek_r1", True)),
        (R1, (), "deepseek_v3", ParserSpec("deepseek_v3", "deepseek_r1", True)),
        (R1.replace("<think>\\n", "").replace("</think>", ""), (), "deepseek_v3", ParserSpec("deepseek_v3")),
        (V31, (), "deepseek_v3", ParserSpec("deepseek_v31", "qwen3")),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", (), "gpt_oss", ParserSpec("harmony", "harmony")),
        ("", (), "gpt_oss", ParserSpec("harmony", "harmony")),
        ("{{ '[TOOL_CALLS][' }}", (), "mistral", ParserSpec("mistral")),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK]", (), "mistral", ParserSpec("mistral", "mistral")),
        ("<tool_call>\n<function=example>\n<parameter=a>", (), "qwen3_moe", ParserSpec("qwen3_coder")),
        ("<tool_call>{{ name }}<arg_key>" + QWEN3_END, (), "glm4_moe", ParserSpec("glm45", "qwen3")),
        ("<|tool_calls_section_begin|>", (), "kimi_k2", ParserSpec("kimi_k2")),
        ("<|tool_calls_section_begin|> <think></think>", (), "kimi_k2", ParserSpec("kimi_k2", "qwen3")),
        (
            "<|start_of_role|> <|tool_call|> Here is my thought process:",
            (),
            "granite",
            ParserSpec("granite", "granite"),
        ),
        ("<|start_of_role|><tool_call></tool_call>", (), "granitemoehybrid", ParserSpec("hermes")),
        ("{{ tools }}<|tool|>", ("<|tool_call|>", "<|/tool_call|>"), "phi3", ParserSpec("phi4")),
        ("Environment: ipython <|python_tag|>", (), "llama", ParserSpec("llama3_json")),
        ('Respond as {"name": function name, "parameters": dictionary}', (), "llama", ParserSpec("llama3_json")),
        ("<|python_start|>", (), "llama4", ParserSpec("llama4_pythonic")),
        ("◁think▷", (), "kimi_vl", ParserSpec(None, "kimi")),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", (), "", ParserSpec("json")),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", (), "llama", ParserSpec()),
        ("", (), "", ParserSpec()),
    ],
)
def test_a_template_names_its_families(
    template: str, special_tokens: tuple[str, ...], model_type: str, spec: ParserSpec
) -> None:
    """A model must call tools without anything being configured."""
    assert sniff(template, special_tokens, model_type) == spec
    assert not spec.tools or spec.tools in registry.tool_families()
    assert not spec.reasoning or spec.reasoning in registry.reasoning_families()


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("[THINK]", True),
    ],
)
def test_a_prompt_shows_whether_the_output_begins_inside_the_reasoning(prompt: str, inside: bool) -> None:
    """With hybrid models, each request decides."""
    assert starts_in_reasoning(ParserSpec(reasoning="qwen3"), prompt) is inside
    assert not starts_in_reasoning(ParserSpec(), prompt)
