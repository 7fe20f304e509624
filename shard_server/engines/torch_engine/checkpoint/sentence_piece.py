"""A SentencePiece BPE vocabulary (pieces and scores, as GGUF stores it) as a Hugging Face tokenizer.

SentencePiece merges, again and again, the two neighbours whose union is the piece with the highest score (Kudo and
Richardson, arXiv:1808.06226; the vocabularies of Llama 1, 2 and Mistral 7B). That is byte-pair encoding whose list of
merges are all ways to cut every piece in two pieces, in the order of the pieces' scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf import TokenType
from tokenizers import Tokenizer, decoders, models, normalizers

_SPACE = "▁"


def sentence_piece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    token_types: Sequence[int],
    *,
    unknown_token_id: int,
    add_space_prefix: bool,
) -> Tokenizer:
    """Without added tokens and post-processing. Raises ValueError when the vocabulary is not a SentencePiece one."""
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
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(pieces: set[str], priority: dict[str, tuple[float, int]]) -> list[tuple[str, str]]:
    """Best piece first; of the cuts of one piece, that whose parts come first in the vocabulary."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=priority.__getitem__):
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        cuts = [cut for cut in cuts if cut[0] in pieces and cut[1] in pieces]
        merges += sorted(cuts, key=lambda cut: (priority[cut[0]][1], priority[cut[1]][1]))
    return merges
