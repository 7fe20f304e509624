"""Makes and signs a receipt from a complete answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvloom.adapters import Adapter
from kvloom.v1.generation_pb2 import Pooling, SamplingParams, StopConditions
from kvloom_common.models.served_model import ServedModel
from kvloom_common.receipts.checks import cost_of
from kvloom_common.receipts.receipt import (
    VERSION,
    Bundle,
    Receipt,
    RequestedGeneration,
    SignedPrice,
    digest,
    encode_bundle,
    output_of,
    wanted_of,
)
from kvloom_common.tenancy.prices import Prices
from router.caller_scope import shown_id
from router.core.actions import AnswerCompleted
from router.core.events import Request, TierRank
from router.features.fingerprints import ModelFingerprint

if TYPE_CHECKING:  # a router without receipts needs no cryptography
    from kvloom_common.receipts.keys import Signer

UNKNOWN: Final = ModelFingerprint("", "", "", "", "", 0)


class ReceiptWriter:
    def __init__(
        self, signer: Signer, prices: Callable[[], Prices], chat_template_checksum: Callable[[str], str]
    ) -> None:
        """`chat_template_checksum` of a model's name; "" if it has no template."""
        self._signer = signer
        self._prices = prices
        self._chat_template_checksum = chat_template_checksum

    def write(
        self, completed: AnswerCompleted, fingerprint: ModelFingerprint | None, policy_revision: str, now: float
    ) -> bytes:
        """Returns the bundle as JSON. `fingerprint`: of the model while the answer was computed; None: its shards
        differed, or changed. `now` in seconds since 1970."""
        request = completed.request
        assert isinstance(request.sampling, SamplingParams)
        choices = sorted(completed.choices, key=lambda choice: choice.index)
        output = [
            output_of(
                choice.index,
                choice.token_ids,
                choice.finish.reason,
                choice.finish.stop_string,
                choice.finish.embedding,
            )
            for choice in choices
        ]
        price = self._prices().at(request.full_name, now)
        is_batch = request.tier is TierRank.BATCH
        of_model = UNKNOWN if fingerprint is None or not completed.is_exact else fingerprint
        wanted = requested(request, of_model, [choice.index for choice in choices])
        counts = (
            len(request.prompt_token_ids),
            choices[0].finish.num_cached_tokens,
            sum(len(choice.token_ids) for choice in choices),
        )
        adapter = request.adapter or Adapter("", "")
        receipt = Receipt(
            version=VERSION,
            request_id=shown_id(request.request_id, request.tenant),
            ended_at_ms=int(now * 1000),
            tenant=request.tenant,
            model=request.model,
            model_version=of_model.version,
            weights_checksum=of_model.checksum,
            card_checksum=of_model.card_checksum,
            chat_template_checksum=self._chat_template_checksum(request.model),
            adapter=adapter.name,
            adapter_checksum=adapter.checksum,
            engine_variant=of_model.variant,
            request_digest=digest(wanted),
            output_digest=digest(output),
            seed=request.sampling.seed,
            policy_revision=policy_revision,
            num_prompt_tokens=counts[0],
            num_cached_tokens=counts[1],
            num_output_tokens=counts[2],
            is_result_cache_hit=completed.is_result_cache_hit,
            is_batch=is_batch,
            price=SignedPrice.of(price),
            cost_nanos=cost_of(price, *counts, is_batch=is_batch, is_result_cache_hit=completed.is_result_cache_hit),
        )
        signature, key_id = self._signer.sign(receipt), self._signer.public.key_id
        return encode_bundle(Bundle(receipt=receipt, signature=signature, key_id=key_id, request=wanted, output=output))


def requested(request: Request, of_model: ModelFingerprint, indexes: Sequence[int]) -> RequestedGeneration:
    """The request as the engine of such a model got it."""
    sampling, stop, pooling = request.sampling, request.stop, request.pooling
    assert isinstance(sampling, SamplingParams)
    assert isinstance(stop, StopConditions)
    assert pooling is None or isinstance(pooling, Pooling)
    window = max(of_model.max_model_len - len(request.prompt_token_ids), 0)
    max_tokens = window if request.max_tokens is None else min(request.max_tokens, window or request.max_tokens)
    return wanted_of(request.prompt_token_ids, sampling, stop, max_tokens, indexes, pooling)


def chat_template_checksum(model: ServedModel | None) -> str:
    """ "" for a model without a template."""
    template = None if model is None else model.tokenizer.template
    return "" if template is None else hashlib.sha256(template.source.encode(errors="surrogatepass")).hexdigest()
