"""The stored objects that a response has to do with: what comes before its input, and what it refers to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from edge_http.endpoints.file_inputs import read_item_files
from edge_http.fetching import UrlFetcher
from edge_http.formatting.json_bytes import Json
from edge_http.openai.responses.input_items import references_in
from edge_http.openai.responses.requests import StoredResponsesBody
from edge_http.openai.responses.templates import RenderedPrompt, rendered
from edge_http.orchestrator_link import OrchestratorLink
from edge_http.wire.headers import CONTEXT
from kvloom.v1.orchestrator_service_pb2 import Owner, ReadContextRequest


class StoredInput(msgspec.Struct):
    """The stored objects that a response has to do with."""

    earlier: list[msgspec.Raw]
    """The items before its input."""
    input: str | list[msgspec.Raw]
    """Its input, with the items to which it refers, and the texts of its files."""
    echo: Json
    """The fields by which the response tells of them."""
    prompt: RenderedPrompt | None = None
    """The prompt that it names."""
    previous_response_id: str = ""
    """The response that it follows. Of a fork this may be an earlier one than its request names."""
    has_more: bool = False
    """The model got more than what is stored: passages or texts of files."""
    generation: bytes = b""
    """The generation (forking.py) of the response that it forks from, if it does so behind a token."""
    own_items: Sequence[msgspec.Raw] = ()
    """Its input as it is stored: with files instead of their texts."""
    is_last_known: bool = False
    """The items before it are those that this edge knew last: storage is slow, or away."""


def context_headers(stored: StoredInput | None) -> Mapping[str, str]:
    """The header that says that the items before an input may not be the latest."""
    return {CONTEXT: "last-known"} if stored is not None and stored.is_last_known else {}


async def stored_of(
    link: OrchestratorLink, owner: Owner, body: StoredResponsesBody, fetcher: UrlFetcher
) -> StoredInput:
    """Raises KvloomError (NOT_FOUND, INVALID_ARGUMENT, ORCHESTRATOR_UNAVAILABLE)."""
    references = references_in(body.input)
    given: str | list[msgspec.Raw] = body.input or []
    earlier: list[msgspec.Raw] = []
    prompt: RenderedPrompt | None = None
    previous, generation = body.previous_response_id or "", b""
    is_last_known = False
    if references or body.previous_response_id or body.conversation_id or body.prompt is not None:
        wanted = ReadContextRequest(
            owner=owner,
            previous_response_id=body.previous_response_id or "",
            conversation_id=body.conversation_id,
            item_ids=list(references.values()),
            prompt_id="" if body.prompt is None else body.prompt.id,
            prompt_version="" if body.prompt is None else body.prompt.version or "",
        )
        if isinstance(body.at, str):
            wanted.at_item = body.at
        elif body.at is not None:
            wanted.at_token = body.at
        context, is_last_known = await link.read_context(wanted)
        earlier = [msgspec.Raw(item) for item in context.items]
        if references and not isinstance(given, str):
            given = list(given)
            for place, item in zip(references, context.referred_items, strict=True):
                given[place] = msgspec.Raw(item)
        if body.at is not None:
            previous, generation = context.forked_from, context.generation
            given = [*map(msgspec.Raw, context.forked_items), *_as_items(given)]
        if body.prompt is not None:
            prompt = rendered(context.prompt, body.prompt)
    own_items = _as_items(given)
    read, given = await read_item_files(link, owner, earlier, given, fetcher)
    return StoredInput(
        read,
        given,
        state_echo(body, prompt),
        prompt,
        previous_response_id=previous,
        has_more=read is not earlier,
        generation=generation,
        own_items=own_items,
        is_last_known=is_last_known,
    )


def state_echo(body: StoredResponsesBody, prompt: RenderedPrompt | None = None) -> Json:
    """The fields that need state, as the response repeats them."""
    instructions = body.instructions
    if prompt is not None and instructions is None:
        instructions = prompt.instructions
    return {
        "instructions": instructions,
        "prompt": msgspec.to_builtins(body.prompt) if prompt is None else prompt.echo,
        "store": body.is_stored,
        "previous_response_id": body.previous_response_id,
        "conversation": {"id": body.conversation_id} if body.conversation_id else None,
        "background": bool(body.background),
    }


def input_items(stored: StoredInput) -> Sequence[msgspec.Raw]:
    """The input as items."""
    return _as_items(stored.input)


def _as_items(given: str | Sequence[msgspec.Raw]) -> Sequence[msgspec.Raw]:
    return [msgspec.Raw(msgspec.json.encode({"role": "user", "content": given}))] if isinstance(given, str) else given
