"""Judges whole texts of other services as if they were served here, for LiteLLM's generic guardrail API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvloom.v1.safety_service_pb2 import CheckWish, Classification, Mask, MaskWish
from kvloom_common.process.request_context import request_fields
from kvloom_common.text.restored_text import with_placeholders
from safety_svc.connection import Found, excerpt_of, finding, prompt_judge
from safety_svc.guardrails import AskModel, Guardrails
from safety_svc.masks import masks_of
from safety_svc.policy import Hit, SafetyPolicy
from safety_svc.screen import CHARS_PER_SLICE, AnswerScreener, check_long_prompt


async def judged(
    policy: SafetyPolicy,
    text: str,
    wish: CheckWish,
    mask_key: bytes,
    guardrails: Guardrails,
    ask_model: AskModel,
    on_found: Callable[[Found], None],
) -> tuple[Classification, Hit | None]:
    """Return the passages to be hidden in the text, and the hit that forbids it nevertheless. Raises
    RuleFailedError."""
    names = request_fields(request_id=wish.request_id, tenant=wish.tenant)
    target = "answer" if wish.is_answer else "prompt"
    masks: list[Mask] = []
    if wish.is_answer:
        hit, flagged = await _judged_answer(policy, text, wish)
    else:
        hidden_for = MaskWish(tenant=wish.tenant, conversation=wish.conversation, guardrails=wish.guardrails)
        masks = await asyncio.to_thread(masks_of, policy, text, hidden_for, mask_key)
        text = with_placeholders(text, masks)
        judge = prompt_judge(policy, wish.tenant, wish.guardrails)
        hit = await check_long_prompt(policy.prompt, text, judge)
        if hit is None and policy.guardrails:
            hit = await guardrails.judge(policy, text, judge, names, ask_model)
        flagged = judge.flagged
    for rule in flagged:
        on_found(Found(target, rule, False, policy.revision, names, wish.tenant))
    if hit is None:
        return Classification(masks=masks), None
    if not hit.is_failure:
        excerpt = "" if wish.is_answer else excerpt_of(text, hit)
        on_found(Found(target, hit.rule.name, True, policy.revision, names, wish.tenant, excerpt=excerpt))
    return Classification(masks=masks, finding=finding(hit)), hit


async def _judged_answer(policy: SafetyPolicy, text: str, wish: CheckWish) -> tuple[Hit | None, dict[str, None]]:
    scope = policy.scopes.of(wish.tenant, wish.guardrails)
    screener = AnswerScreener(policy.answer, policy.watched_answer, scope)
    for start in range(0, len(text), CHARS_PER_SLICE):
        screener.push(text[start : start + CHARS_PER_SLICE])
        if screener.hit is not None:
            break
        await asyncio.sleep(0)
    else:
        screener.close()
    return screener.hit, screener.flagged
