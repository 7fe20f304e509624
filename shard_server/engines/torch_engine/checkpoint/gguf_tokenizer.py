"""Builds a Hugging Face tokenizer from the vocabulary and merges inside a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shard_server.engines.base import EngineError

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# GGUF has no field for these; llama.cpp, too, recognises the end of a turn by the token's text.
_END_OF_TURN_TOKENS = frozenset({"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"})
_SPACE = "▁"
"""SentencePiece writes this character for a space."""


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


def sentence_piece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    token_types: Sequence[int],
    *,
    unknown_token_id: int,
    add_space_prefix: bool,
) -> Tokenizer:
    """A SentencePiece BPE vocabulary (pieces and scores, as GGUF stores it) as a Hugging Face tokenizer.

    SentencePiece repeatedly merges the two neighbours whose union is the piece with the highest score (Kudo and
    Richardson, arXiv:1808.06226; the vocabularies of Llama 1, 2 and Mistral 7B). That equals byte-pair encoding with
    all ways to cut every piece in two as its merges, in the order of the pieces' scores.

    The result has no added tokens and no post-processing. Raises ValueError when the vocabulary is not a SentencePiece
    one.
    """
    if not len(tokens) == len(scores) == len(token_types):
        raise ValueError(f"{len(tokens)} tokens, {len(scores)} scores, {len(token_types)} types")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    has_byte_tokens = TokenType.BYTE in token_types
    if has_byte_tokens and not all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        raise ValueError("some of the 256 byte tokens are missing")
    pieces = {token for token, kind in zip(tokens, token_types, strict=True) if kind == TokenType.NORMAL}
    try:
        model = models.BPE(
            vocabulary,
            _merges(pieces, {token: (-scores[token_id], token_id) for token, token_id in vocabulary.items()}),
            unk_token=tokens[unknown_token_id],
            fuse_unk=True,
            byte_fallback=has_byte_tokens,
        )
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(str(error)) from error
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if add_space_prefix else replace
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(pieces: set[str], priority: dict[str, tuple[float, int]]) -> list[tuple[str, str]]:
    """The merges, best piece first; the cuts of one piece are in the order of their parts in the vocabulary."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=priority.__getitem__):
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        cuts = [cut for cut in cuts if cut[0] in pieces and cut[1] in pieces]
        merges += sorted(cuts, key=lambda cut: (priority[cut[0]][1], priority[cut[1]][1]))
    return merges
