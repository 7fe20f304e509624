"""Checks what can be checked of a receipt without computing anything: that its parts belong together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvloom_common.receipts.receipt import Bundle, digest
from kvloom_common.tenancy.prices import Price


class ReceiptFault(NamedTuple):
    """Something that is wrong with a receipt."""

    part: str
    """signature, request, output, counts, price, weights, adapter, tokens, vector."""
    message: str


def faults_of(bundle: Bundle) -> Iterator[ReceiptFault]:
    """Without those of the signature (keys.py)."""
    receipt = bundle.receipt
    if digest(bundle.request) != receipt.request_digest:
        yield ReceiptFault("request", "the prompt or the parameters are not those that were signed")
    if digest(bundle.output) != receipt.output_digest:
        yield ReceiptFault("output", "the tokens or the reasons for their end are not those that were signed")
    num_output_tokens = sum(len(choice.token_ids) for choice in bundle.output)
    counted = len(bundle.request.prompt_token_ids), num_output_tokens
    if counted != (receipt.num_prompt_tokens, receipt.num_output_tokens):
        yield ReceiptFault(
            "counts",
            f"it counts {receipt.num_prompt_tokens} prompt and {receipt.num_output_tokens} output tokens, and has "
            f"{counted[0]} and {counted[1]}",
        )
    if not 0 <= receipt.num_cached_tokens <= receipt.num_prompt_tokens:
        yield ReceiptFault(
            "counts", f"{receipt.num_cached_tokens} of {receipt.num_prompt_tokens} prompt tokens were cached"
        )
    cost_nanos = cost_of(
        receipt.price.price,
        receipt.num_prompt_tokens,
        receipt.num_cached_tokens,
        receipt.num_output_tokens,
        is_batch=receipt.is_batch,
        is_result_cache_hit=receipt.is_result_cache_hit,
    )
    if cost_nanos != receipt.cost_nanos:
        yield ReceiptFault(
            "price", f"it says {receipt.cost_nanos} billionths, but its tokens cost {cost_nanos} at its price"
        )


def cost_of(
    price: Price, num_prompt: int, num_cached: int, num_output: int, *, is_batch: bool, is_result_cache_hit: bool
) -> int:
    return price.cost_nanos(
        num_prompt, num_cached, num_output, is_batch=is_batch, is_result_cache_hit=is_result_cache_hit
    )
