"""The pool of an InferencePool: the pods that its selector names, and the priorities of its InferenceObjectives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import structlog

from kvloom_common.addresses import join_address
from tools.gateway.kubernetes_api import KubernetesApi, Object
from tools.gateway.pool import MAX_ENDPOINTS, Pool, PoolEndpoint

log = structlog.get_logger()

_POOLS: Final = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
_OBJECTIVES: Final = (
    "/apis/llm-d.ai/v1alpha2/namespaces/{}/inferenceobjectives",
    "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives",  # its former group
)
_PODS: Final = "/api/v1/namespaces/{}/pods"


class InferencePool:
    """`watch` must run. It never changes what the file of the pool says beside endpoints and objectives."""

    def __init__(
        self, api: KubernetesApi, namespace: str, name: str, settings: Pool, use: Callable[[Pool], None]
    ) -> None:
        """`use` is called with each new pool."""
        self._api = api
        self._namespace = namespace
        self._name = name
        self._settings = settings
        self._use = use
        self._selector: Mapping[str, str] = {}
        self._ports: Sequence[int] = ()
        self._pods: Sequence[Object] = ()
        self._objectives: dict[str, Sequence[Object]] = {}
        self._following_pods: asyncio.Task[None] | None = None
        self._used: Pool | None = None

    async def watch(self) -> None:
        """Follow the objects until cancelled."""
        named = {"fieldSelector": f"metadata.name={self._name}"}
        try:
            async with self._api, asyncio.TaskGroup() as tasks:
                for path in _OBJECTIVES:
                    tasks.create_task(self._api.follow(path.format(self._namespace), {}, self._on_objectives(path)))
                await self._api.follow(
                    _POOLS.format(self._namespace), named, lambda pools: self._on_pools(pools, tasks)
                )
        finally:
            self._selector, self._following_pods = {}, None

    def _on_pools(self, pools: Sequence[Object], tasks: asyncio.TaskGroup) -> None:
        spec = next((pool["spec"] for pool in pools), None)
        if spec is None:
            log.warning("inference_pool_lost", namespace=self._namespace, name=self._name)
        selector = {} if spec is None else spec["selector"]["matchLabels"]
        self._ports = () if spec is None else [port["number"] for port in spec["targetPorts"]]
        if selector != self._selector or not selector:
            self._selector = selector
            if self._following_pods is not None:
                self._following_pods.cancel()
                self._following_pods = None
            if selector:
                labels = ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
                following = self._api.follow(_PODS.format(self._namespace), {"labelSelector": labels}, self._on_pods)
                self._following_pods = tasks.create_task(following, name="pods of the pool")
                return  # their list makes the pool
        self._use_if_new()

    def _on_pods(self, pods: Sequence[Object]) -> None:
        self._pods = pods
        self._use_if_new()

    def _on_objectives(self, path: str) -> Callable[[Sequence[Object]], None]:
        def use(objectives: Sequence[Object]) -> None:
            self._objectives[path] = objectives
            self._use_if_new()

        return use

    def _use_if_new(self) -> None:
        objectives = [one for path in _OBJECTIVES for one in self._objectives.get(path, ())]
        pool = pool_of_objects(self._settings, self._name, self._ports, self._pods, objectives)
        if pool != self._used:
            self._used = pool
            self._use(pool)


def pool_of_objects(
    settings: Pool, name: str, ports: Sequence[int], pods: Sequence[Object], objectives: Sequence[Object]
) -> Pool:
    """The settings with the endpoints of pods that are ready, and the priorities of the pool's objectives. Pure."""
    addresses = sorted(join_address(ip, port) for ip in _ready_ips(pods) for port in ports)
    if len(addresses) > MAX_ENDPOINTS:
        log.warning("endpoints_left_out", num_endpoints=len(addresses) - MAX_ENDPOINTS)
    priorities = {
        one["metadata"]["name"]: int(one["spec"].get("priority") or 0)
        for one in objectives
        if one["spec"]["poolRef"]["name"] == name
    }
    return msgspec.structs.replace(
        settings,
        endpoints=[PoolEndpoint(address=address) for address in addresses[:MAX_ENDPOINTS]],
        objectives={**settings.objectives, **priorities},
    )


def _ready_ips(pods: Sequence[Object]) -> Iterator[str]:
    for pod in pods:
        status: Mapping[str, Any] = pod.get("status", {})
        is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ()))
        if is_ready and status.get("podIP") and not pod["metadata"].get("deletionTimestamp"):
            yield status["podIP"]
