"""Small tokenizers, trained when they are needed, for tests that need no model."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvloom_common.text.chat_template import ChatTemplate
from kvloom_common.text.tokenizer import ModelTokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and im_end | <| |> start of it\n" * 20,
    "héé 日本語 日本 🙂 " * 20,
]


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    """GPT-2 style; "<think>" is an added token that is not special and not in the model's own vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL[:2],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.add_special_tokens([SPECIAL[2]])  # behind it, so that ids shift when a twin is renumbered
    return tokenizer


class SharedTokenizer(ModelTokenizer):
    def close(self) -> None:
        """Raises AssertionError: other tests of this process still need its threads."""
        raise AssertionError("The tokenizer that all tests share was closed.")


@functools.cache
def model_tokenizer() -> ModelTokenizer:
    """One for all tests of a process, which do not close it."""
    tokenizer = byte_level_tokenizer()
    eos = tokenizer.token_to_id("<|im_end|>")
    return SharedTokenizer(tokenizer, template=ChatTemplate(CHATML, {}), eos_token_ids=frozenset({eos}))


def marked_tokenizer(marker: str) -> ModelTokenizer:
    """As `model_tokenizer`, with one more special token, as those by which some models mark their calls."""
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.add_special_tokens([marker])
    eos = tokenizer.token_to_id("<|im_end|>")
    return ModelTokenizer(tokenizer, template=ChatTemplate(CHATML, {}), eos_token_ids=frozenset({eos}))


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama 2 style: "▁" for spaces, <0xNN> for bytes that the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "b", "é"]
    model = {"type": "BPE", "vocab": {p: i for i, p in enumerate(pieces)}, "merges": []}
    tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
