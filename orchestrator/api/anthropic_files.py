"""Files in the shape of Anthropic's API. They are those of OpenAI's."""

from __future__ import annotations

import datetime
import mimetypes
from typing import Any, Final

from kvloom.errors import invalid_argument
from orchestrator.api import files
from orchestrator.api.call import OperationCall, operation
from orchestrator.api.files import KIND
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject
from orchestrator.store.pages import page_of

MAX_PAGE: Final = 1000
MAX_IDS: Final = 100
_PAGE: Final = "page_"


def shown(one: StoredObject) -> dict[str, Any]:
    guessed = mimetypes.guess_type(one.body["filename"])[0]
    return {
        "id": one.id,
        "type": "file",
        "filename": one.body["filename"],
        "mime_type": one.body.get("mime_type") or guessed or "application/octet-stream",
        "size_bytes": one.body["bytes"],
        "created_at": _time(one.created_at),
        "expires_at": None if one.expires_at is None else _time(one.expires_at),
        "downloadable": True,
    }


@operation("listAnthropicFiles")
async def list_files(call: OperationCall) -> Any:
    """The query's `ids` are separated by commas."""
    if ids := [one for one in call.query.get("ids", "").split(",") if one]:
        if "page" in call.query or "limit" in call.query:
            raise invalid_argument("ids goes with neither page nor limit.", "ids")
        if len(set(ids)) > MAX_IDS:
            raise invalid_argument(f"ids has at most {MAX_IDS} entries.", "ids")
        async with call.database.reading() as connection:
            found = [await objects.find(connection, call.tenant, KIND, one, call.now) for one in dict.fromkeys(ids)]
        return {"data": [shown(one) for one in found if one is not None], "next_page": None}
    after = call.query.get("page", "")
    if after and not after.startswith(_PAGE):
        raise invalid_argument("page: the list has no such page.", "page")
    wanted = {"after": after.removeprefix(_PAGE), "limit": call.query.get("limit", "20")}
    page = page_of(wanted, most=MAX_PAGE)
    async with call.database.reading() as connection:
        listed, has_more = await objects.listed(connection, call.tenant, KIND, page, call.now)
    return {"data": [shown(one) for one in listed], "next_page": f"{_PAGE}{listed[-1].id}" if has_more else None}


@operation("getAnthropicFile")
async def get(call: OperationCall) -> Any:
    return shown(await files.find(call))


@operation("deleteAnthropicFile")
async def delete(call: OperationCall) -> Any:
    deleted = await files.delete(call)
    return {"id": deleted["id"], "type": "file_deleted"}


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).isoformat().replace("+00:00", "Z")
