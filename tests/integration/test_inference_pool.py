"""`kvloom epp` follows the objects of a Kubernetes API server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import ConfigError
from tests.fakes.fake_kubernetes_api import FakeKubernetesApi
from tests.waiting import eventually
from tools.gateway import kubernetes_api
from tools.gateway.inference_pool import InferencePool
from tools.gateway.kubernetes_api import KubernetesApi
from tools.gateway.pool import Pool, read_pool

POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/llms/inferencepools"
OBJECTIVES = "/apis/llm-d.ai/v1alpha2/namespaces/llms/inferenceobjectives"
PODS = "/api/v1/namespaces/llms/pods"


class Followed:
    """The pools that were used, in order."""

    def __init__(self, api: FakeKubernetesApi) -> None:
        self.api = api
        self.pools: list[Pool] = []

    async def until(self, *addresses: str, **objectives: int) -> None:
        """The last pool has these endpoints and priorities."""
        await eventually(lambda: self._last() == ([*addresses], objectives), f"{addresses} and {objectives}")

    def _last(self) -> Any:
        return ([one.address for one in self.pools[-1].endpoints], self.pools[-1].objectives) if self.pools else None

    def put_pool(self, **labels: str) -> None:
        ports = [{"number": 8000}]
        self.api.put(POOLS, "llama", spec={"selector": {"matchLabels": labels}, "targetPorts": ports})

    def put_pod(self, name: str, ip: str, *, is_ready: bool = True, ends: bool = False, app: str = "vllm") -> None:
        metadata: dict[str, Any] = {"labels": {"app": app}}
        if ends:
            metadata["deletionTimestamp"] = "2026-11-28T17:00:00Z"
        conditions = [{"type": "Ready", "status": "True" if is_ready else "False"}]
        self.api.put(PODS, name, metadata=metadata, status={"podIP": ip, "conditions": conditions})


@pytest.fixture
async def followed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    for name in ("FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS"):
        monkeypatch.setattr(kubernetes_api, name, 0.01)
    api = FakeKubernetesApi()
    await api.start()
    found = Followed(api)
    found.put_pod("a", "10.0.0.1")
    found.put_pod("b", "fd00::2")
    found.put_pod("other", "10.0.0.9", app="web")
    found.put_pool(app="vllm")
    pool = InferencePool(KubernetesApi(api.url), "llms", "llama", Pool(max_requests=7), found.pools.append)
    watching = asyncio.create_task(pool.watch())
    yield found
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    await api.close()


async def test_the_pool_is_the_ready_pods_of_its_selector(followed: Followed) -> None:
    """A pod that is not ready would fail requests, and one that ends gets no new ones; settings of the file stay."""
    await followed.until("10.0.0.1:8000", "[fd00::2]:8000")
    assert followed.pools[-1].max_requests == 7
    followed.put_pod("c", "10.0.0.3", is_ready=False)
    followed.put_pod("b", "fd00::2", ends=True)
    await followed.until("10.0.0.1:8000")
    followed.put_pod("c", "10.0.0.3")
    await followed.until("10.0.0.1:8000", "10.0.0.3:8000")
    followed.api.delete(PODS, "a")
    await followed.until("10.0.0.3:8000")
    followed.put_pool(app="web")
    await followed.until("10.0.0.9:8000")
    followed.api.delete(POOLS, "llama")
    await followed.until()


async def test_an_endless_event_is_not_read(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server sends, memory is bounded; then everything is listed again."""
    await followed.until("10.0.0.1:8000", "[fd00::2]:8000")
    monkeypatch.setattr(kubernetes_api, "MAX_EVENT_BYTES", 4096)
    followed.put_pod("c", "10.0.0.3")
    await followed.until("10.0.0.1:8000", "10.0.0.3:8000", "[fd00::2]:8000")
    num_lists = followed.api.num_lists
    followed.api.put(PODS, "c", metadata={"labels": {"app": "vllm"}}, spec={"long": "x" * 10_000})
    await eventually(lambda: followed.api.num_lists > num_lists, "another list")
    followed.put_pod("d", "10.0.0.4")
    await followed.until("10.0.0.1:8000", "10.0.0.4:8000", "[fd00::2]:8000")


async def test_objectives_have_the_priorities_of_their_objects(followed: Followed) -> None:
    """Those of other pools are not this one's, and without a priority it is 0. Their kind may be added later than the
    picker has started, and is then found after a while."""
    await followed.until("10.0.0.1:8000", "[fd00::2]:8000")
    both = ("10.0.0.1:8000", "[fd00::2]:8000")
    pool_ref = {"poolRef": {"name": "llama"}}
    followed.api.put(OBJECTIVES, "batch", spec={**pool_ref, "priority": -1})
    followed.api.put(OBJECTIVES, "chat", spec=pool_ref)
    followed.api.put(OBJECTIVES, "foreign", spec={"poolRef": {"name": "qwen"}, "priority": 5})
    pool = InferencePool(KubernetesApi(followed.api.url), "llms", "llama", Pool(), followed.pools.append)
    watching = asyncio.create_task(pool.watch())
    await followed.until(*both, batch=-1, chat=0)
    followed.api.put(OBJECTIVES, "batch", spec={**pool_ref, "priority": -2})
    await followed.until(*both, batch=-2, chat=0)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def test_what_was_known_stays_while_the_server_is_away_and_is_listed_again(followed: Followed) -> None:
    """The engines do not need it; a watch that lags too far behind begins anew."""
    await followed.until("10.0.0.1:8000", "[fd00::2]:8000")
    num_pools = len(followed.pools)
    followed.api.is_down = True
    followed.api.forget_history()
    followed.api.collections[PODS].pop("b")  # unseen by any watch
    num_lists = followed.api.num_lists
    await asyncio.sleep(0)
    assert len(followed.pools) == num_pools
    followed.api.is_down = False
    await followed.until("10.0.0.1:8000")
    assert followed.api.num_lists > num_lists


def test_endpoints_come_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside an InferencePool has settings alone, and outside a cluster the API's address must be given."""
    file = tmp_path / "pool.toml"
    file.write_text("max_requests = 3")
    assert read_pool(file, has_endpoints=False).max_requests == 3
    with pytest.raises(ConfigError, match="missing"):
        read_pool(file)
    file.write_text('endpoints = [{address = "10.0.0.1:1"}]')
    with pytest.raises(ConfigError, match="InferencePool"):
        read_pool(file, has_endpoints=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="URL"):
        KubernetesApi()
