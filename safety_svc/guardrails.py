"""External guardrails, asked by LiteLLM's generic guardrail API: services of others that judge prompts over HTTP.

[[rules]]
name = "vendor"
kind = "guardrail"
url = "http://127.0.0.1:9000"          # POST URL/beta/litellm_basic_guardrail_api
api_key_file = "vendor.key"            # sent as x-api-key; default: none
timeout_seconds = 1.0                  # the default
applies_to = ["prompt"]
on_failure = "refuse"
"""

from __future__ import annotations

import asyncio
import http.client
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal

import msgspec

from kvloom_common.process.failure_log import FailureLog
from kvloom_common.transport.no_redirects import NoRedirects
from safety_svc.policy import Guardrail, Hit, SafetyPolicy
from safety_svc.rule_modes import Judge

PATH: Final = "/beta/litellm_basic_guardrail_api"
MAX_RESPONSE_BYTES: Final = 16 * 2**20
FAILURES_TO_OPEN: Final = 5
"""So many failures in a row open the breaker: the service is not asked for a while, as if it had failed again."""
OPEN_SECONDS: Final = 5.0
MAX_THREADS: Final = 64
"""So many prompts are with guardrails at a time; a waiting thread costs little. Others wait, within their deadline."""


class _Answer(msgspec.Struct):
    action: Literal["NONE", "BLOCKED", "GUARDRAIL_INTERVENED"]


class _Breaker:
    """Counts the failures of one guardrail."""

    def __init__(self, rule: str) -> None:
        self.num_failures = 0
        self.open_until = 0.0
        self.failures = FailureLog("guardrail_failed", rule=rule)

    def note(self, cause: str) -> None:
        self.num_failures += 1
        self.failures.note(cause)
        if self.num_failures >= FAILURES_TO_OPEN:
            self.open_until = time.monotonic() + OPEN_SECONDS


class Guardrails:
    """Asks the guardrails of all policies."""

    def __init__(self) -> None:
        self._breakers: dict[Guardrail, _Breaker] = {}
        self._threads = ThreadPoolExecutor(MAX_THREADS, "guardrail")
        self._opener = urllib.request.build_opener(NoRedirects, urllib.request.ProxyHandler({}))

    def close(self) -> None:
        """Ask nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def judge(self, policy: SafetyPolicy, text: str, judge: Judge, request: Mapping[str, str]) -> Hit | None:
        """Ask all guardrails that hold at the same time. `request` names the request. A guardrail that replaces text
        counts as one that blocks it, because nothing is replaced here."""
        held = [each for each in policy.guardrails if judge.holds(each.rule)]
        answers = await asyncio.gather(*(self._ask(each, text, request) for each in held))
        hits: list[Hit] = []
        for guardrail, action in zip(held, answers, strict=True):
            rule = guardrail.rule
            if action is None:
                if judge.fails(rule):
                    hits.append(Hit(rule, 0, is_failure=True))
            elif action != "NONE" and judge.forbids(rule):
                hits.append(Hit(rule, 0))
        return min(hits, key=lambda hit: hit.is_failure, default=None)

    async def _ask(self, guardrail: Guardrail, text: str, request: Mapping[str, str]) -> str | None:
        """The action; None: the guardrail has not said what to do."""
        breaker = self._breakers.get(guardrail)
        if breaker is None:
            breaker = self._breakers[guardrail] = _Breaker(guardrail.rule.name)
        if time.monotonic() < breaker.open_until:
            return None
        try:
            async with asyncio.timeout(guardrail.timeout_seconds):
                loop = asyncio.get_running_loop()
                answer = await loop.run_in_executor(self._threads, self._post, guardrail, text, request)
        except (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError) as error:
            breaker.note(type(error).__name__)
            return None
        breaker.num_failures = 0
        return answer.action

    def _post(self, guardrail: Guardrail, text: str, request: Mapping[str, str]) -> _Answer:
        """Raises OSError, HTTPException, MsgspecError, ValueError."""
        body: dict[str, Any] = {
            "texts": [text],
            "input_type": "request",
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
