"""The routes of vector stores. The id of a route is the operation of the orchestrator."""

from __future__ import annotations

from typing import Final

from edge_http.openapi.route import Route
from edge_http.state import bodies, objects
from edge_http.state.encoders import encoder_of
from edge_http.state.handler import operating
from edge_http.state.state_route import state_route

_TAG: Final = "Vector stores"
_STORES: Final = "/v1/vector_stores"
_STORE: Final = f"{_STORES}/{{id}}"
_FILES: Final = f"{_STORE}/files"
_FILE: Final = f"{_FILES}/{{file_id}}"
_BATCHES: Final = f"{_STORE}/file_batches"
_BATCH: Final = f"{_BATCHES}/{{batch_id}}"
_PAGE: Final = ("after", "limit", "order")
_FILES_PAGE: Final = (*_PAGE, "before", "file_status")

VECTOR_ROUTES: Final[tuple[Route, ...]] = (
    state_route(
        "POST", _STORES, "createVectorStore", _TAG, "Begin a vector store", objects.VectorStoreObject,
        body=bodies.VectorStoreBody, examples={"With a file": {"name": "Manuals", "file_ids": ["file-1"]}},
        handler=operating("createVectorStore", _STORES, bodies.VectorStoreBody, encoder_of),
    ),
    state_route(
        "GET", _STORES, "listVectorStores", _TAG, "List vector stores", objects.VectorStoreList, parameters=_PAGE
    ),
    state_route("GET", _STORE, "getVectorStore", _TAG, "Get a vector store", objects.VectorStoreObject),
    state_route(
        "POST", _STORE, "updateVectorStore", _TAG, "Change a vector store", objects.VectorStoreObject,
        body=bodies.VectorStoreChanges, examples={"A name": {"name": "Manuals"}},
    ),
    state_route("DELETE", _STORE, "deleteVectorStore", _TAG, "Delete a vector store", objects.DeletedObject),
    state_route(
        "POST", f"{_STORE}/search", "searchVectorStore", _TAG, "Search in its files", objects.SearchPage,
        body=bodies.SearchBody, examples={"A question": {"query": "How is it cleaned?", "max_num_results": 3}},
    ),
    state_route(
        "POST", _FILES, "createVectorStoreFile", _TAG, "Have a file indexed", objects.VectorStoreFileObject,
        body=bodies.StoreFileBody, examples={"With attributes": {"file_id": "file-1", "attributes": {"year": 2026}}},
    ),
    state_route(
        "GET", _FILES, "listVectorStoreFiles", _TAG, "List its files", objects.VectorStoreFileList,
        parameters=_FILES_PAGE,
    ),
    state_route("GET", _FILE, "getVectorStoreFile", _TAG, "Get a file of it", objects.VectorStoreFileObject),
    state_route(
        "POST", _FILE, "updateVectorStoreFile", _TAG, "Change a file's attributes", objects.VectorStoreFileObject,
        body=bodies.AttributesBody, examples={"A year": {"attributes": {"year": 2026}}},
    ),
    state_route("DELETE", _FILE, "deleteVectorStoreFile", _TAG, "Take a file out of it", objects.DeletedObject),
    state_route(
        "GET", f"{_FILE}/content", "getVectorStoreFileContent", _TAG, "Read the chunks of a file", objects.ContentPage
    ),
    state_route(
        "POST", _BATCHES, "createVectorStoreFileBatch", _TAG, "Have several files indexed", objects.FileBatchObject,
        body=bodies.FileBatchBody, examples={"Two files": {"file_ids": ["file-1", "file-2"]}},
    ),
    state_route("GET", _BATCH, "getVectorStoreFileBatch", _TAG, "Get a file batch", objects.FileBatchObject),
    state_route(
        "POST", f"{_BATCH}/cancel", "cancelVectorStoreFileBatch", _TAG, "Cancel a file batch", objects.FileBatchObject
    ),
    state_route(
        "GET", f"{_BATCH}/files", "listVectorStoreFileBatchFiles", _TAG, "List the files of a file batch",
        objects.VectorStoreFileList, parameters=_FILES_PAGE,
    ),
)  # fmt: skip
