"""Builds a Hugging Face tokenizer from the vocabulary and merges inside a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.sentence_piece import sentence_piece_bpe

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# GGUF has no field for these; llama.cpp, too, tells the end of a turn by the token's text.
_END_OF_TURN_TOKENS = frozenset({"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"})


def build_tokenizer(gguf_path: Path, fields: dict[str, Any], out_dir: Path) -> dict[str, Any]:
    """Write tokenizer.json into `out_dir` and return the content of tokenizer_config.json. Raises EngineError."""
    kind = fields.get("tokenizer.ggml.model")
    try:
        tokens: list[str] = fields["tokenizer.ggml.tokens"]
        token_types: list[int] = fields["tokenizer.ggml.token_type"]
        _check_vocabulary(tokens, token_types)
        if kind == "gpt2":
            merges = [_split_merge(merge) for merge in fields["tokenizer.ggml.merges"]]
            tokenizer = _byte_level_bpe(fields.get("tokenizer.ggml.pre", "default"), tokens, merges)
        elif kind == "llama":
            tokenizer = sentence_piece_bpe(
                tokens,
                fields["tokenizer.ggml.scores"],
                token_types,
                unknown_token_id=fields.get("tokenizer.ggml.unknown_token_id", 0),
                add_space_prefix=bool(fields.get("tokenizer.ggml.add_space_prefix", True)),
            )
        else:
            raise EngineError(
                f"{gguf_path}: tokenizer {kind!r} is not supported, only byte-level BPE ('gpt2') and SentencePiece BPE "
                "('llama'); take the model's original safetensors directory instead"
            )
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise EngineError(f"{gguf_path}: the vocabulary is incomplete, damaged or unsupported ({error})") from error
    _add_tokens(tokenizer, tokens, token_types)
    bos_token_id = fields.get("tokenizer.ggml.bos_token_id")
    add_bos_token = bool(fields.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    if add_bos_token and bos_token_id is not None:
        bos_token = tokens[bos_token_id]
        beginning = processors.TemplateProcessing(single=f"{bos_token} $A", special_tokens=[(bos_token, bos_token_id)])
        tokenizer.post_processor = (
            processors.Sequence([processors.ByteLevel(trim_offsets=False), beginning]) if kind == "gpt2" else beginning
        )
    tokenizer.save(str(out_dir / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.get(f"{fields.get('general.architecture')}.context_length"),
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


def _check_vocabulary(tokens: Sequence[str], token_types: Sequence[int]) -> None:
    if len(tokens) != len(token_types):
        raise ValueError(f"{len(tokens)} tokens, {len(token_types)} types")
    if len(set(tokens)) != len(tokens):
        raise ValueError("a token is there twice")


def _split_merge(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], token_types: Sequence[int]) -> None:
    """Tokens that are found in a text before it is cut: control tokens, and others that the model's authors added."""
    added = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    for token, token_type in zip(tokens, token_types, strict=True):
        if token_type in added and token:
            special = added[TokenType(token_type)]
            add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
            add([AddedToken(token, special=special, normalized=False)])


def _byte_level_bpe(pre: str, tokens: Sequence[str], merges: list[tuple[str, str]]) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # tokenizers raises bare Exception for merges that are not in the vocabulary
        raise ValueError(f"merges: {error}") from error
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging. Each kind is as in the tokenizer.json of the models that GGUF names so."""
    splits = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
    if kind in splits:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(splits[kind]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if kind == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if kind in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raise ValueError(f"pre-tokenizer {kind!r}")
