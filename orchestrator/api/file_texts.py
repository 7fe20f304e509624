"""The texts of files that requests give to a model, stored ones and such that come with the request."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

from kvloom.errors import invalid_argument
from orchestrator.api import files
from orchestrator.api.call import OperationCall, operation
from orchestrator.search.indexing import MAX_FILE_BYTES


@operation("readFileText")
async def read_text(call: OperationCall) -> Any:
    """Returns the text of the file of an id, or else of `data`, which is base64. Raises KvloomError (NOT_FOUND,
    INVALID_ARGUMENT)."""
    data = call.body.get("data", "")
    if call.ids:
        one = await files.find(call)
        key, name = one.id, one.body["filename"]
        if one.body["bytes"] > MAX_FILE_BYTES:
            raise invalid_argument(f"The file has more than {MAX_FILE_BYTES} bytes.", "file")
    else:
        name = call.body["filename"]
        key = hashlib.sha256(f"{name}\0{data}".encode()).hexdigest()

    async def content() -> bytes:
        if call.ids:
            return b"".join([piece async for piece in call.contents.read(call.tenant, key)])
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise invalid_argument("The content of the file is not base64.", "file") from error

    return {"filename": name, "text": await call.texts.text_of(call.tenant, key, name, content, call.now)}
