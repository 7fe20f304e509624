"""Installs the chart with the real Helm in a fake cluster, upgrades it, takes upgrades back, and removes it.

`python -m tests.deploy.check install`. Helm applies objects on the server's side, so that what others have set, such as
the number of shards that an autoscaler wants, has to survive.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.deploy.fake_cluster import FakeCluster, Object

NAME: Final = "kvloom"
WAIT_SECONDS: Final = 60
_SCALED: Final = ("StatefulSet", "llm", "kvloom-shard-a")


def check_install(chart: Path, values: Mapping[str, Any], validate: Callable[[Object], None]) -> None:
    """`values` have two models, `a` and `b`, and KEDA. `validate` raises ValueError."""
    import helm_python as helm

    def changed(**changes: Any) -> dict[str, Any]:
        return {**copy.deepcopy(dict(values)), **changes}

    with (
        FakeCluster(validate) as cluster,
        helm.Config(kubeconfig_content=cluster.kubeconfig(), namespace="llm") as config,
    ):
        settings = {"wait": "legacy", "timeout": WAIT_SECONDS}

        def upgrade(to: dict[str, Any]) -> list[tuple[str, str, str]]:
            """Returns what was written, without Helm's own records."""
            cluster.writes.clear()
            config.upgrade(str(chart), NAME, to, **settings)
            return sorted(write for write in cluster.writes if write[1] != "Secret")

        config.install(str(chart), NAME, changed(), **settings)
        assert _states(config) == ["deployed"]
        first = cluster.specs()
        assert {kind for kind, _ in first} == {
            "Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "Certificate",
            "ScaledObject",
        }  # fmt: skip
        print(f"install: {len(first)} objects, all ready")

        assert upgrade(changed()) == [], "the same values change nothing"
        print("upgrade with the same values: nothing is written")

        cluster.merge(_SCALED, {"spec": {"replicas": 3}}, "kube-controller-manager")
        new_image = changed(images={"torch": "kvloom-torch:0.4.0", "services": "kvloom-services:0.4.0"})
        written = upgrade(new_image)
        assert {what for what, _, _ in written} == {"changed"}
        assert {(kind, name) for _, kind, name in written} == {
            (kind, name) for kind, name in first if kind in ("Deployment", "StatefulSet")
        }
        scaled = cluster.objects[_SCALED]
        assert scaled["spec"]["replicas"] == 3, "an upgrade must not undo what the autoscaler has decided"
        assert scaled["spec"]["template"]["spec"]["containers"][0]["image"] == "kvloom-torch:0.4.0"
        print(f"upgrade of the images: {len(written)} objects change, the autoscaler's replicas stay")

        other = changed(shards=[*changed()["shards"][:1], {"name": "c", "model": "c", "replicas": 1}], drainSeconds=90)
        written = upgrade(other)
        shards = {(what, name) for what, kind, name in written if kind == "StatefulSet"}
        assert shards == {("changed", "kvloom-shard-a"), ("created", "kvloom-shard-c"), ("deleted", "kvloom-shard-b")}
        gone = {kind for what, kind, name in written if what == "deleted" and name == "kvloom-shard-b"}
        assert gone == {"StatefulSet", "Service", "PodDisruptionBudget", "ScaledObject"}
        print("upgrade to other models: one comes, one goes with all that belongs to it")

        before = cluster.specs()
        _refused(helm.HelmError, lambda: upgrade(changed(drainSeconds=0)), "drainSeconds")
        assert cluster.specs() == before
        cluster.refuses = ("StatefulSet", "kvloom-shard-a")
        _refused(helm.HelmError, lambda: upgrade(new_image), "refused")
        cluster.refuses = None
        assert _states(config)[-1] == "failed"
        config.rollback(NAME, version=4, **settings)
        assert cluster.specs() == before, "what a failed upgrade has begun is undone"
        print("an upgrade that the server refuses in the midst: rolled back, all objects as before")

        config.rollback(NAME, version=1, **settings)
        again = cluster.specs()
        assert again.pop(("StatefulSet", "kvloom-shard-a"))["spec"].pop("replicas") == 3
        first.pop(("StatefulSet", "kvloom-shard-a"))
        assert again == first
        print("rollback to the first revision: the objects of the installation")

        config.uninstall(NAME, **settings)
        assert cluster.specs() == {}
        assert not cluster.of_kind("Secret")
        print("uninstall: nothing is left")


def _states(config: Any) -> list[str]:
    return [one["status"] for one in config.history(NAME)]


def _refused(kind: type[Exception], call: Callable[[], Any], expected: str) -> None:
    try:
        call()
    except kind as error:
        if expected in str(error):
            return
        raise
    raise AssertionError(f"{expected} was not refused")
