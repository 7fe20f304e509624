"""Builds a Hugging Face tokenizer from the vocabulary and merges inside a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from shard_server.engines.base import EngineError

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GGUF has no field for these; llama.cpp, too, tells the end of a turn by the token's text.
_END_OF_TURN_TOKENS = frozenset({"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"})


def build_tokenizer(gguf_path: Path, fields: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """Write tokenizer.json into `out_dir` and return the content of tokenizer_config.json. Raises EngineError."""
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise EngineError(
            f"{gguf_path}: tokenizer {fields.get('tokenizer.ggml.model')!r} is not supported, only byte-level BPE "
            "('gpt2'); convert the model's original safetensors directory instead"
        )
    try:
        tokens: list[str] = fields["tokenizer.ggml.tokens"]
        token_types: list[int] = fields["tokenizer.ggml.token_type"]
        merges = [_split_merge(merge) for merge in fields["tokenizer.ggml.merges"]]
    except (KeyError, ValueError) as error:
        raise EngineError(f"{gguf_path}: the vocabulary is incomplete or damaged ({error})") from error
    kind = fields.get("tokenizer.ggml.pre", "default")
    tokenizer = _byte_level_bpe(gguf_path, kind, tokens, merges)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, token_types, strict=True)
            if token_type == TokenType.CONTROL
        ]
    )
    bos_token_id = fields.get("tokenizer.ggml.bos_token_id")
    add_bos_token = bool(fields.get("tokenizer.ggml.add_bos_token", False))
    if add_bos_token and bos_token_id is not None:
        bos_token = tokens[bos_token_id]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=f"{bos_token} $A", special_tokens=[(bos_token, bos_token_id)]),
            ]
        )
    tokenizer.save(str(out_dir / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.get("llama.context_length"),
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    for key, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{field}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[f"{key}_token"] = tokens[token_id]
    return config


def end_of_sequence_ids(fields: dict[str, Any]) -> list[int]:
    """All tokens that end an answer, the declared one first."""
    declared = [
        fields[name]
        for name in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
        if name in fields
    ]
    by_text = [
        token_id
        for token_id, (token, token_type) in enumerate(
            zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
        )
        if token_type == TokenType.CONTROL and token in _END_OF_TURN_TOKENS
    ]
    return list(dict.fromkeys([*declared, *by_text]))


def _split_merge(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _byte_level_bpe(gguf_path: Path, kind: str, tokens: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise EngineError(f"{gguf_path}: the vocabulary holds a token twice")
    whole_words_first = kind == "llama-bpe"
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words_first))
    except Exception as error:  # tokenizers raises bare Exception for merges that are not in the vocabulary
        raise EngineError(f"{gguf_path}: the tokenizer's merges are damaged ({error})") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(gguf_path, kind)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(gguf_path: Path, kind: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging. Each kind is as in the tokenizer.json of the models that GGUF names so."""
    if kind == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if kind == "llama-bpe":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if kind in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raise EngineError(f"{gguf_path}: pre-tokenizer {kind!r} is not supported")
