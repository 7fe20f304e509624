"""A Kubernetes API server for Helm, without a cluster behind it: it stores objects, refuses what a real one refuses of
the kinds that the chart has, and pretends at once that pods run. In an environment of its own (`make test-deploy`).

What it knows: discovery, create, read, list by labels, replace, delete, merge patches, and server-side apply with
owners of fields, lists merged by their keys, and conflicts. Objects are validated by the caller's function on every
write, and what Kubernetes holds immutable cannot be changed. It has no admission, no quotas, no defaults, and no
garbage collection.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]
Path = tuple[str, ...]

KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    "v1": {
        "Namespace": "namespaces", "Secret": "secrets", "ConfigMap": "configmaps", "Service": "services",
        "ServiceAccount": "serviceaccounts", "Pod": "pods",
    },
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets", "ReplicaSet": "replicasets"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "cert-manager.io/v1": {"Certificate": "certificates"},
    "keda.sh/v1alpha1": {"ScaledObject": "scaledobjects"},
}  # fmt: skip
IMMUTABLE: Final[Mapping[str, tuple[Path, ...]]] = {
    "Deployment": (("spec", "selector"),),
    "StatefulSet": (
        ("spec", "selector"),
        ("spec", "serviceName"),
        ("spec", "podManagementPolicy"),
        ("spec", "volumeClaimTemplates"),
    ),
    "Service": (("spec", "clusterIP"),),
}
MERGE_KEYS: Final[Mapping[str, str]] = {
    "containers": "name", "initContainers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath",
    "topologySpreadConstraints": "topologyKey",
}  # fmt: skip
"""The keys by which elements of a list are told apart. Ports have two, and other lists are replaced whole."""
VERBS: Final = ["create", "delete", "get", "list", "patch", "update", "watch"]


class RefusedError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class FakeCluster:
    """Use `with`. `objects` are by kind, namespace and name; `writes` says what was created, changed and deleted since
    it was last cleared."""

    def __init__(self, validate: Callable[[Object], None]) -> None:
        """`validate` raises ValueError for an object that the API server's schemas refuse."""
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.writes: list[tuple[str, str, str]] = []
        """(what was done, kind, name)."""
        self.refuses: tuple[str, str] | None = None
        """The kind and the name of an object that no write is accepted of, as by an admission webhook."""
        self._validate = validate
        self._owners: dict[tuple[str, str, str], dict[Path, str]] = {}
        """Who has set each field last, by object and field."""
        self._versions = itertools.count(1)
        self._lock = threading.Lock()
        cluster = self

        class Handler(_Handler):
            @property
            def cluster(self) -> FakeCluster:
                return cluster

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> FakeCluster:
        self._thread.start()
        self.write({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "llm"}}, "test")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def kubeconfig(self) -> str:
        host, port = self._server.server_address[:2]
        names = {"cluster": "fake", "user": "fake", "namespace": "llm"}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "clusters": [{"name": "fake", "cluster": {"server": f"http://{host}:{port}"}}],
                "users": [{"name": "fake", "user": {}}],
                "contexts": [{"name": "fake", "context": names}],
            }
        )

    def of_kind(self, kind: str) -> dict[str, Object]:
        return {name: one for (of, _, name), one in self.objects.items() if of == kind}

    def specs(self) -> dict[tuple[str, str], Any]:
        """What users have asked for, by kind and name, without what Helm keeps for itself."""
        kept = {"Secret", "Namespace", "ReplicaSet"}
        return {
            (kind, name): copy.deepcopy({key: one.get(key) for key in ("spec", "data") if key in one})
            for (kind, _, name), one in self.objects.items()
            if kind not in kept
        }

    # -- writes -------------------------------------------------------------------------------------------------------

    def write(self, wanted: Object, manager: str, *, may_exist: bool = False) -> Object:
        """Create or replace an object. Raises RefusedError."""
        with self._lock:
            key = _key(wanted)
            before = self.objects.get(key)
            if before is not None and not may_exist:
                raise RefusedError(409, "AlreadyExists", f"{key[0]} {key[2]} already exists")
            self._owners[key] = {path: manager for path, _ in _leaves(_owned(wanted))}
            return self._store(key, before, wanted)

    def merge(self, key: tuple[str, str, str], patch: Object, manager: str) -> Object:
        """A merge patch (RFC 7396). Raises RefusedError."""
        with self._lock:
            before = self._found(key)
            for path, _ in _leaves(_owned(patch)):
                self._owners[key][path] = manager
            return self._store(key, before, _merged_patch(before, patch))

    def apply(self, wanted: Object, manager: str, *, force: bool) -> Object:
        """Server-side apply. Raises RefusedError for a field that another manager has set to something else."""
        with self._lock:
            key = _key(wanted)
            before = self.objects.get(key)
            owners = self._owners.setdefault(key, {})
            new = dict(_leaves(_owned(wanted)))
            result = copy.deepcopy(before) if before is not None else {}
            for path, value in new.items():
                other = owners.get(path, manager)
                if other != manager and not force and _at(result, path) != value:
                    raise RefusedError(409, "Conflict", f'conflict with "{other}": .{".".join(path)}')
            for path in [path for path, owner in owners.items() if owner == manager and path not in new]:
                del owners[path]
                _remove(result, path)
            owners.update(dict.fromkeys(new, manager))
            return self._store(key, before, _merged(result, wanted))

    def delete(self, key: tuple[str, str, str]) -> None:
        with self._lock:
            self._found(key)
            del self.objects[key]
            self._owners.pop(key, None)
            if key[0] == "Deployment":
                self.objects.pop(("ReplicaSet", key[1], key[2]), None)
            self.writes.append(("deleted", key[0], key[2]))

    def _found(self, key: tuple[str, str, str]) -> Object:
        if key not in self.objects:
            raise RefusedError(404, "NotFound", f"{key[0]} {key[2]} not found")
        return self.objects[key]

    def _store(self, key: tuple[str, str, str], before: Object | None, wanted: Object) -> Object:
        one = copy.deepcopy(wanted)
        one.pop("status", None)
        if self.refuses == (key[0], key[2]):
            raise RefusedError(403, "Forbidden", f"{key[0]} {key[2]} is refused")
        for path in IMMUTABLE.get(key[0], ()) if before is not None else ():
            if _at(before, path) not in (None, _at(one, path)):
                raise RefusedError(422, "Invalid", f"{key[0]} {key[2]}: .{'.'.join(path)} is immutable")
        checked = copy.deepcopy(one)
        for name in ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"):
            checked["metadata"].pop(name, None)
        try:
            self._validate(checked)
        except ValueError as error:
            raise RefusedError(422, "Invalid", f"{key[0]} {key[2]}: {error}") from error
        old = (before or {}).get("metadata", {})
        is_new_spec = before is None or before.get("spec") != one.get("spec")
        is_changed = before is None or _stripped(before) != _stripped(one)
        one["metadata"] |= {
            "uid": old.get("uid") or str(uuid.uuid4()),
            "creationTimestamp": "2026-11-28T00:00:00Z",
            "generation": old.get("generation", 0) + is_new_spec,
            "resourceVersion": str(next(self._versions)) if is_changed else old["resourceVersion"],
        }
        if key[0] == "Service" and "clusterIP" not in one["spec"]:
            one["spec"]["clusterIP"] = "10.96.0.10"  # as the server assigns it
        _pretend(one)
        self.objects[key] = one
        if key[0] == "Deployment":
            self.objects["ReplicaSet", key[1], key[2]] = _replica_set(one)
        if is_changed:
            self.writes.append(("created" if before is None else "changed", key[0], key[2]))
        return one


def _pretend(one: Object) -> None:
    """The controllers have done their work."""
    generation, kind = one["metadata"]["generation"], one["kind"]
    if kind in ("Deployment", "StatefulSet"):
        count = one["spec"].get("replicas", 1)
        names = ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas", "currentReplicas")
        one["status"] = {"observedGeneration": generation, **dict.fromkeys(names, count)}
        one["status"] |= {"currentRevision": "1", "updateRevision": "1"}
        one["status"]["conditions"] = [
            {"type": "Available", "status": "True"},
            {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"},
        ]
    elif kind == "PodDisruptionBudget":
        one["status"] = {"observedGeneration": generation, "currentHealthy": 1, "desiredHealthy": 0}
        one["status"]["conditions"] = [{"type": "DisruptionAllowed", "status": "True"}]
    elif kind in ("Certificate", "ScaledObject"):
        one["status"] = {"conditions": [{"type": "Ready", "status": "True", "observedGeneration": generation}]}


def _replica_set(deployment: Object) -> Object:
    """The one by which Helm sees that a Deployment's new pods run."""
    metadata, spec = deployment["metadata"], deployment["spec"]
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"]}
    count = spec.get("replicas", 1)
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata.get("namespace", "llm"),
            "uid": f"{metadata['uid']}-pods",
            "labels": spec["template"]["metadata"]["labels"],
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": {"replicas": count, "selector": spec["selector"], "template": spec["template"]},
        "status": {"replicas": count, "readyReplicas": count, "availableReplicas": count},
    }


# -- fields -----------------------------------------------------------------------------------------------------------


def _owned(one: Object) -> Object:
    """Without what every writer has to say, or only the server may."""
    kept = {key: value for key, value in one.items() if key not in ("apiVersion", "kind", "status", "metadata")}
    metadata = {key: one["metadata"][key] for key in ("labels", "annotations") if key in one.get("metadata", {})}
    return {**kept, **({"metadata": metadata} if metadata else {})}


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and (keys := _element_keys(path[-1] if path else "", value)) is not None:
        for key, inner in zip(keys, value, strict=True):
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _element_keys(name: str, elements: list[Any]) -> list[str] | None:
    """How elements are told apart; None: the list is one value."""
    if not elements or not all(isinstance(one, dict) for one in elements):
        return None
    if name == "ports":
        number = "containerPort" if "containerPort" in elements[0] else "port"
        return [f"{one.get(number)}/{one.get('protocol', 'TCP')}" for one in elements]
    key = MERGE_KEYS.get(name)
    return [str(one[key]) for one in elements] if key is not None and all(key in one for one in elements) else None


def _at(value: Any, path: Path) -> Any:
    for number, key in enumerate(path):
        if isinstance(value, list):
            keys = _element_keys(path[number - 1], value) or []
            value = value[keys.index(key)] if key in keys else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _remove(value: Any, path: Path) -> None:
    parents: list[tuple[Any, Any]] = []
    for number, key in enumerate(path):
        place: Any = key
        if isinstance(value, list):
            keys = _element_keys(path[number - 1], value) or []
            if key not in keys:
                return
            place = keys.index(key)
        elif not isinstance(value, dict) or key not in value:
            return
        parents.append((value, place))
        value = value[place]
    container, place = parents.pop()
    del container[place]
    while parents and not container:  # nobody has set what is empty now
        container, place = parents.pop()
        del container[place]


def _merged(before: Any, wanted: Any, name: str = "") -> Any:
    if isinstance(before, dict) and isinstance(wanted, dict):
        merged = {key: _merged(before.get(key), value, key) for key, value in wanted.items()}
        return {**{key: value for key, value in before.items() if key not in wanted}, **merged}
    if isinstance(before, list) and isinstance(wanted, list):
        keys, old_keys = _element_keys(name, wanted), _element_keys(name, before)
        if keys is not None and old_keys is not None:
            old = dict(zip(old_keys, before, strict=True))
            merged = [_merged(old.get(key), one) for key, one in zip(keys, wanted, strict=True)]
            return merged + [one for key, one in old.items() if key not in keys]
    return copy.deepcopy(wanted)


def _merged_patch(before: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged_patch(result.get(key), value)
    return result


def _stripped(one: Object) -> Object:
    server_sets = {"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"}
    metadata = {key: value for key, value in one["metadata"].items() if key not in server_sets}
    spec = {key: value for key, value in one.get("spec", {}).items() if key != "clusterIP" or value == "None"}
    return {**{key: value for key, value in one.items() if key not in ("status", "spec")}, "metadata": metadata,
            "spec": spec}  # fmt: skip


def _key(one: Object) -> tuple[str, str, str]:
    namespace = "" if one["kind"] == "Namespace" else one["metadata"].get("namespace", "llm")
    return one["kind"], namespace, one["metadata"]["name"]


# -- HTTP -------------------------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def cluster(self) -> FakeCluster:
        raise NotImplementedError

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path in _DISCOVERY:
            self._answer(_DISCOVERY[parts.path])
            return
        self._serve(self._get)

    def do_POST(self) -> None:
        self._serve(self._post)

    def do_PUT(self) -> None:
        self._serve(self._put)

    def do_PATCH(self) -> None:
        self._serve(self._patch)

    def do_DELETE(self) -> None:
        self._serve(self._delete)

    def _serve(self, call: Callable[[str, str, str, str, dict[str, str], Any], tuple[int, Any]]) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        try:
            version, kind, namespace, name = _place(parts.path)
            raw = b"" if self.command == "DELETE" else raw  # options
            body = _secret_of(raw) if raw.startswith(_PROTOBUF) else yaml.safe_load(raw) if raw else None
            status, found = call(version, kind, namespace, name, query, body)
        except RefusedError as error:
            status = error.code
            found = {
                "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": error.code, "reason": error.reason,
                "message": str(error),
            }  # fmt: skip
        self._answer(found, status)

    def _answer(self, found: Any, status: int = 200) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _get(
        self, version: str, kind: str, namespace: str, name: str, query: dict[str, str], _body: Any
    ) -> tuple[int, Any]:
        objects = self.cluster.objects
        if name:
            if (kind, namespace, name) not in objects:
                raise RefusedError(404, "NotFound", f"{kind} {name} not found")
            return 200, objects[kind, namespace, name]
        wanted = [pair.split("=", 1) for pair in query.get("labelSelector", "").split(",") if "=" in pair]
        items = [
            one
            for (of, where, _), one in sorted(objects.items())
            if of == kind
            and where == namespace
            and all(one["metadata"].get("labels", {}).get(key) == value for key, value in wanted)
        ]
        return 200, {"apiVersion": version, "kind": f"{kind}List", "metadata": {"resourceVersion": "1"}, "items": items}

    def _post(
        self, _version: str, _kind: str, namespace: str, _name: str, query: dict[str, str], body: Any
    ) -> tuple[int, Any]:
        body["metadata"].setdefault("namespace", namespace)
        return 201, self.cluster.write(body, query.get("fieldManager", "unknown"))

    def _put(
        self, _version: str, _kind: str, namespace: str, _name: str, query: dict[str, str], body: Any
    ) -> tuple[int, Any]:
        body["metadata"].setdefault("namespace", namespace)
        return 200, self.cluster.write(body, query.get("fieldManager", "unknown"), may_exist=True)

    def _patch(
        self, _version: str, kind: str, namespace: str, name: str, query: dict[str, str], body: Any
    ) -> tuple[int, Any]:
        manager, content = query.get("fieldManager", "unknown"), self.headers.get("Content-Type", "")
        if "apply-patch" in content:
            body["metadata"].setdefault("namespace", namespace)
            return 200, self.cluster.apply(body, manager, force=query.get("force") == "true")
        if "merge-patch" in content and "strategic" not in content:
            return 200, self.cluster.merge((kind, namespace, name), body, manager)
        raise RefusedError(415, "UnsupportedMediaType", content)

    def _delete(
        self, _version: str, kind: str, namespace: str, name: str, _query: dict[str, str], _body: Any
    ) -> tuple[int, Any]:
        self.cluster.delete((kind, namespace, name))
        return 200, {"apiVersion": "v1", "kind": "Status", "status": "Success"}


_PROTOBUF: Final = b"k8s\0"
"""Begins an object that is no JSON: Helm writes the Secrets in which it keeps releases in this way."""


def _secret_of(raw: bytes) -> Object:
    """A Secret in Kubernetes' protocol buffers, of which Helm sets name, labels, type and data."""
    unknown = dict(_fields(raw[len(_PROTOBUF) :]))
    secret = list(_fields(unknown[2]))
    metadata = list(_fields(dict(secret)[1]))
    texts = {number: value.decode() for number, value in metadata if number in (1, 3)}
    labels = (dict(_fields(entry)) for number, entry in metadata if number == 11)
    entries = (dict(_fields(entry)) for number, entry in secret if number == 2)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": texts[1],
            **({"namespace": texts[3]} if texts.get(3) else {}),
            "labels": {one[1].decode(): one.get(2, b"").decode() for one in labels},
        },
        "data": {one[1].decode(): base64.b64encode(one.get(2, b"")).decode() for one in entries},
        "type": dict(secret)[3].decode(),
    }


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Those that have a length, by their numbers; integers are left out."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        tag = varint()
        length = varint()
        if tag & 7 == 2:
            yield tag >> 3, message[position : position + length]
            position += length


_KIND_OF: Final = {(version, plural): kind for version, kinds in KINDS.items() for kind, plural in kinds.items()}


def _place(path: str) -> tuple[str, str, str, str]:
    """Version, kind, namespace and name ("": all of them). Raises RefusedError."""
    parts = path.strip("/").split("/")
    version, rest = (parts[1], parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    kind = _KIND_OF.get((version, rest[0] if rest else ""))
    if kind is None:
        raise RefusedError(404, "NotFound", f"the server could not find {path}")
    return version, kind, namespace, rest[1] if len(rest) > 1 else ""


def _discovery() -> dict[str, Any]:
    found: dict[str, Any] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    groups = []
    for version, kinds in KINDS.items():
        resources = [
            {"name": plural, "singularName": kind.lower(), "namespaced": kind != "Namespace", "kind": kind,
             "verbs": VERBS}
            for kind, plural in kinds.items()
        ]  # fmt: skip
        path = "/api/v1" if version == "v1" else f"/apis/{version}"
        found[path] = {
            "apiVersion": "v1", "kind": "APIResourceList", "groupVersion": version, "resources": resources,
        }  # fmt: skip
        if "/" in version:
            group, _, name = version.partition("/")
            served = {"groupVersion": version, "version": name}
            groups.append({"name": group, "versions": [served], "preferredVersion": served})
    found["/apis"] = {"apiVersion": "v1", "kind": "APIGroupList", "groups": groups}
    urls = {path[1:]: {"serverRelativeURL": f"/openapi/v3{path}"} for path in found if path.count("/") > 1}
    found |= {f"/openapi/v3/{path}": _schema(path) for path in urls}
    found["/openapi/v3"] = {"paths": urls}
    return found


def _schema(path: str) -> dict[str, Any]:
    """What Helm looks for: that the server itself validates fields."""
    version = path.split("/", 1)[1]
    group, _, name = version.rpartition("/")
    paths = {
        f"/{path}/namespaces/{{namespace}}/{plural}/{{name}}": {
            "patch": {
                "x-kubernetes-group-version-kind": {"group": group, "version": name, "kind": kind},
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "responses": {"200": {"description": "OK"}},
            }
        }
        for kind, plural in KINDS[version].items()
    }
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": "v1"}, "paths": paths}


_DISCOVERY: Final = _discovery()
