"""Asks those who judge texts outside of this process: services of others, and models of the fabric
(judge_formats.py).

Services of others are asked over HTTP by LiteLLM's generic guardrail API.

[[rules]]
name = "vendor"
kind = "guardrail"
url = "http://127.0.0.1:9000"          # POST URL/beta/litellm_basic_guardrail_api
api_key_file = "vendor.key"            # sent as x-api-key; default: none
timeout_seconds = 1.0                  # the default
applies_to = ["prompt"]
on_failure = "refuse"

A model is asked by a router, over the router's own stream.

[[rules]]
name = "guard"
kind = "judge"
model = "llama-guard"
format = "llama_guard"
applies_to = ["prompt"]
on_failure = "refuse"
"""

from __future__ import annotations

import asyncio
import http.client
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal

import msgspec

from kvloom.v1.safety_service_pb2 import JudgeAnswer, JudgeMessage, JudgeQuestion
from kvloom_common.process.access_log import FailureLog
from kvloom_common.transport.public_addresses import NoRedirects
from safety_svc.injections import embedded_part, injection_weights
from safety_svc.judge_formats import FORMATS
from safety_svc.policy import Guardrail, Hit, InjectionJudge, ModelJudge, OutsideRule, SafetyPolicy, worst
from safety_svc.rule_modes import Judge, Rule

PATH: Final = "/beta/litellm_basic_guardrail_api"
MAX_RESPONSE_BYTES: Final = 16 * 2**20
FAILURES_TO_OPEN: Final = 5
"""So many failures in a row open the breaker: the service is not asked for a while, as if it had failed again."""
OPEN_SECONDS: Final = 5.0
MAX_THREADS: Final = 64
"""So many prompts are with guardrails at a time; a waiting thread costs little. Others wait, within their deadline."""


class JudgeError(Exception):
    """A model has given no judgement. The message says why."""

    def __init__(self, message: str, *, is_due_to_text: bool = False) -> None:
        """`is_due_to_text`: other texts may well be judged, so that the breaker does not count it. Otherwise one tenant
        could keep the texts of all others from being judged."""
        super().__init__(message)
        self.is_due_to_text = is_due_to_text


AskModel = Callable[[JudgeQuestion], Awaitable[JudgeAnswer]]
"""Returns what the model has written, or the embedding. Raises JudgeError."""


async def no_model(_question: JudgeQuestion) -> JudgeAnswer:
    """Stands in for AskModel where no router is connected."""
    raise JudgeError("no router")


class _Answer(msgspec.Struct):
    action: Literal["NONE", "BLOCKED", "GUARDRAIL_INTERVENED"]


class _Breaker:
    """Counts the failures of one guardrail."""

    def __init__(self, rule: str) -> None:
        self.num_failures = 0
        self.open_until = 0.0
        self.failures = FailureLog("guardrail_failed", rule=rule)

    def note(self, error: Exception) -> None:
        self.failures.note(str(error) if isinstance(error, JudgeError) else type(error).__name__)
        if isinstance(error, JudgeError) and error.is_due_to_text:
            return
        self.num_failures += 1
        if self.num_failures >= FAILURES_TO_OPEN:
            self.open_until = time.monotonic() + OPEN_SECONDS


class Guardrails:
    """Asks the guardrails and the models of all policies."""

    def __init__(self) -> None:
        self._breakers: dict[OutsideRule, _Breaker] = {}
        self._threads = ThreadPoolExecutor(MAX_THREADS, "guardrail")
        self._opener = urllib.request.build_opener(NoRedirects, urllib.request.ProxyHandler({}))

    def close(self) -> None:
        """Ask nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def judge(
        self, policy: SafetyPolicy, text: str, judge: Judge, request: Mapping[str, str], ask_model: AskModel = no_model
    ) -> Hit | None:
        """Ask all that hold at the same time. `request` names the request. A guardrail that replaces text counts as one
        that blocks it, because nothing is replaced here."""
        return await self._judge(policy.guardrails, text, judge, request, ask_model, is_answer=False)

    async def judge_answer(
        self, policy: SafetyPolicy, text: str, judge: Judge, request: Mapping[str, str], ask_model: AskModel
    ) -> None:
        """Ask all that watch answers. `judge` notes what they find."""
        await self._judge(policy.answer_guardrails, text, judge, request, ask_model, is_answer=True)

    async def _judge(
        self,
        guardrails: Sequence[OutsideRule],
        text: str,
        judge: Judge,
        request: Mapping[str, str],
        ask_model: AskModel,
        *,
        is_answer: bool,
    ) -> Hit | None:
        held = [each for each in guardrails if judge.holds(each.rule)]
        asking = (self._ask(each, text, request, ask_model, is_answer=is_answer) for each in held)
        answers = await asyncio.gather(*asking)
        hits = [_hit(each.rule, is_forbidden, judge) for each, is_forbidden in zip(held, answers, strict=True)]
        return worst(hits)

    def unasked(self, policy: SafetyPolicy, judge: Judge) -> Hit | None:
        """Return the failure that follows if nobody can be asked."""
        return worst(_hit(each.rule, None, judge) for each in policy.guardrails if judge.holds(each.rule))

    async def _ask(
        self, guardrail: OutsideRule, text: str, request: Mapping[str, str], ask_model: AskModel, *, is_answer: bool
    ) -> bool | None:
        """True when it forbids the text; None: it has not said."""
        breaker = self._breakers.get(guardrail)
        if breaker is None:
            breaker = self._breakers[guardrail] = _Breaker(guardrail.rule.name)
        if time.monotonic() < breaker.open_until:
            return None
        try:
            async with asyncio.timeout(guardrail.timeout_seconds):
                if isinstance(guardrail, ModelJudge):
                    is_forbidden = await _judgement(guardrail, text, request, ask_model, is_answer=is_answer)
                elif isinstance(guardrail, InjectionJudge):
                    is_forbidden = await _looks_like_an_attack(guardrail, text, request, ask_model)
                else:
                    loop = asyncio.get_running_loop()
                    answer = await loop.run_in_executor(self._threads, self._post, guardrail, text, request, is_answer)
                    is_forbidden = answer.action != "NONE"
        except (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError, JudgeError) as error:
            breaker.note(error)
            return None
        breaker.num_failures = 0
        return is_forbidden

    def _post(self, guardrail: Guardrail, text: str, request: Mapping[str, str], is_answer: bool) -> _Answer:
        """Raises OSError, HTTPException, MsgspecError, ValueError."""
        body: dict[str, Any] = {
            "texts": [text],
            "input_type": "response" if is_answer else "request",
            "request_data": {"user_api_key_team_id": request.get("tenant", "")},
            "litellm_call_id": request.get("request_id", ""),
            "additional_provider_specific_params": {},
        }
        headers = {"Content-Type": "application/json", "x-api-key": guardrail.api_key}
        url = guardrail.url.rstrip("/") + PATH
        asked = urllib.request.Request(url, msgspec.json.encode(body), headers)
        with self._opener.open(asked, timeout=guardrail.timeout_seconds) as response:
            raw = response.read(MAX_RESPONSE_BYTES + 1)
            if response.status != 200 or len(raw) > MAX_RESPONSE_BYTES:
                raise ValueError
            return msgspec.json.decode(raw, type=_Answer)


def _hit(rule: Rule, is_forbidden: bool | None, judge: Judge) -> Hit | None:
    if is_forbidden is None:
        return Hit(rule, 0, is_failure=True) if judge.fails(rule) else None
    return Hit(rule, 0) if is_forbidden and judge.forbids(rule) else None


async def _judgement(
    judge: ModelJudge, text: str, request: Mapping[str, str], ask_model: AskModel, *, is_answer: bool
) -> bool:
    """Raises JudgeError."""
    form = FORMATS[judge.terms.format]
    prompt = form.prompt_for(judge.terms, text, is_answer)
    question = JudgeQuestion(
        model=judge.model,
        messages=[JudgeMessage(role=role, content=content) for role, content in prompt.messages],
        template_options=msgspec.json.encode(prompt.options).decode() if prompt.options else "",
        max_tokens=prompt.max_tokens,
        **_names(judge, request),
    )
    is_forbidden = form.forbids(judge.terms, (await ask_model(question)).text)
    if is_forbidden is None:
        raise JudgeError("no judgement", is_due_to_text=True)
    return is_forbidden


async def _looks_like_an_attack(
    judge: InjectionJudge, text: str, request: Mapping[str, str], ask_model: AskModel
) -> bool:
    """Raises JudgeError."""
    part = embedded_part(text)
    if not part:
        return False
    messages = [JudgeMessage(role="user", content=part)]
    question = JudgeQuestion(model=judge.model, messages=messages, wants_embedding=True, **_names(judge, request))
    found = injection_weights().looks_like_an_attack((await ask_model(question)).embedding)
    if found is None:
        raise JudgeError("the embedding is of another encoder")
    return found


def _names(judge: ModelJudge | InjectionJudge, request: Mapping[str, str]) -> dict[str, Any]:
    """The fields that every question has."""
    return {
        "timeout_seconds": judge.timeout_seconds,
        "tenant": request.get("tenant", ""),
        "request_id": request.get("request_id", ""),
    }
