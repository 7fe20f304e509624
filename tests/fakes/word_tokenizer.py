"""A small tokenizer of the kind that BERT has: words, and with "##" before them the rest of words."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

WORDS = ("the", "loom", "##s", "weave", "##d", "cloth", "cat", "sleep", "a", "lot", ".", ",", "!", "bomb", "##ing")


def word_tokenizer(num_tokens: int = 320) -> Tokenizer:
    """Its first tokens are [PAD], [UNK], [CLS] and [SEP], then WORDS; the rest are fillers. As in published files, it
    truncates and pads unless it is told otherwise."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    names += [f"filler{number}" for number in range(num_tokens - len(names))]
    tokenizer = Tokenizer(WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer
