"""A FakeRouterLink whose safety service hides e-mail addresses, and whose model writes their placeholders."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from kvloom.v1.router_service_pb2 import ModerateRequest, ModerateResponse
from kvloom.v1.safety_service_pb2 import Classification
from safety_svc.masks import masks_of
from safety_svc.policy import load_policy
from tests.fakes.fake_router_link import FakeRequest, FakeRouterLink
from tests.fakes.tiny_tokenizer import model_tokenizer

MAIL = "eve@example.org"
_POLICY = """
[[rules]]
name = "email"
kind = "pii"
finds = "email"
mode = "mask"
"""
_PLACEHOLDER = re.compile(r"\[EMAIL-\w+\]")


class MaskingLink(FakeRouterLink):
    """`write` makes the deltas of every answer, of the placeholder in its prompt."""

    def __init__(self, folder: Path, write: Callable[[str], Sequence[str]]) -> None:
        super().__init__()
        path = folder / "masking-policy.toml"
        path.write_text(_POLICY)
        self._policy = load_policy(path)
        self._write = write
        self.prompts: list[str] = []
        self.script = self._answer

    async def moderate(self, request: ModerateRequest) -> ModerateResponse:
        if not request.HasField("mask"):
            return await super().moderate(request)
        found = [masks_of(self._policy, text, request.mask, b"a key") for text in request.texts]
        return ModerateResponse(results=[Classification(masks=masks) for masks in found])

    def _answer(self, request: FakeRequest) -> None:
        prompt = model_tokenizer().decode(request.request.prompt_token_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        request.start()
        for delta in self._write(_PLACEHOLDER.findall(prompt)[-1]):
            request.tokens(delta)
        request.finish()
