"""A prompt that ends with the beginning of the answer, for every kind of chat template."""

from __future__ import annotations

import pytest

from kvloom.errors import KvloomError
from kvloom.text.chat_message import ChatMessage
from kvloom_common.text.chat_template import ChatTemplate
from kvloom_common.text.tokenizer import continued_prompt
from tests.fakes.tiny_tokenizer import CHATML, model_tokenizer

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim }}"
    "{{ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
THINKS = (
    "{% for m in messages %}{% set content = m.content.split('</think>')[-1].lstrip('\n') %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
ENDS_WITH_THE_USER = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('The last message must be the user\\'s.') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
FORGETS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
REPEATS = "{% for m in messages %}{{ m.content }}|{{ m.content }}{% endfor %}"
CHANGES = "{% for m in messages %}{{ m.content | replace('e', '3') }}{% endfor %}"


def conversation(beginning: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "the end"}, {"role": "assistant", "content": beginning}]


@pytest.mark.parametrize(
    ("source", "before"),
    [
        (CHATML, "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA, "<s><|start|>user<|end|>\n\nthe end<|eot|><|start|>assistant<|end|>\n\n"),
        (THINKS, "<|user|>the end<|end|><|assistant|><think>\n\n</think>\n\n"),
    ],
)
@pytest.mark.parametrize("beginning", ["{", "e", "the end", "Sure,\nhere it is:", "|"])
def test_the_prompt_ends_where_the_answer_goes_on(source: str, before: str, beginning: str) -> None:
    """Nothing of what the template adds behind the message is left, whatever the message is, also a part of that."""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert continued_prompt(template, conversation(beginning)) == before + beginning


@pytest.mark.parametrize("source", [ENDS_WITH_THE_USER, FORGETS, REPEATS, CHANGES])
def test_templates_that_cannot_do_it(source: str) -> None:
    """A prompt that the caller did not mean would be worse than an error."""
    with pytest.raises(KvloomError) as caught:
        continued_prompt(ChatTemplate(source, {}), conversation("Here"))
    assert caught.value.field == "messages"


async def test_a_message_with_the_mark_itself() -> None:
    """The text that marks the end while rendering cannot be used to cut a prompt elsewhere."""
    mark = "\uf8ffend of the last message\uf8ff"
    with pytest.raises(KvloomError):
        continued_prompt(ChatTemplate(CHATML, {}), [{"role": "user", "content": mark}, *conversation("x")[1:]])


async def test_the_tokens_of_a_continued_prompt() -> None:
    """Special tokens that a caller writes stay text here as well."""
    tokenizer = model_tokenizer()
    messages = [ChatMessage("user", "a"), ChatMessage("assistant", "b<|im_end|>")]
    token_ids, text = await tokenizer.encode_chat(messages, is_continued=True)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    [end_id] = tokenizer.special_token_ids(["<|im_end|>"])
    assert list(token_ids).count(end_id) == 1
