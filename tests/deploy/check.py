"""Renders the chart by Helm and validates what comes out, installs and upgrades it in a fake cluster, and runs the
build commands of the images in a clean folder.

`python -m tests.deploy.check [chart] [install] [images]`, in an environment with helm-python-sdk, kubernetes-validate
and PyYAML: `make test-deploy`. It has no container engine: the commands are those of the Dockerfile, with its folders
replaced.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.install import check_install

REPOSITORY: Final = Path(__file__).resolve().parents[2]
CHART: Final = REPOSITORY / "deploy" / "helm" / "kvloom"
EXAMPLES: Final = REPOSITORY / "deploy" / "helm" / "examples"
KUBERNETES: Final = "1.34"
OF_OTHERS: Final = {"keda.sh/v1alpha1", "cert-manager.io/v1", "leaderworkerset.x-k8s.io/v1"}
"""Kinds whose schemas Kubernetes does not have: only their pod templates are validated."""
VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "behind a proxy": {"insecure": True},
    "own TLS": {"tls": {"secretName": "own"}, "networkPolicy": {"enabled": False}, "control": {"enabled": False}},
    "without Redis": {"insecure": True, "discovery": "dns", "control": {"enabled": False}},
    "cert-manager and KEDA": {
        "tls": {"certManager": {"issuer": "ca", "dnsNames": ["llm.example.com"]}},
        "keda": {"enabled": True},
        "shards": [
            {"name": "a", "model": "a", "replicas": 0, "maxReplicas": 4, "nodeSelector": {"gpu": "h100"}},
            {
                "name": "b",
                "model": "/models/b",
                "replicas": 3,
                "tolerations": [{"operator": "Exists"}],
                "volumes": [{"name": "m", "emptyDir": {}}],
                "volumeMounts": [{"name": "m", "mountPath": "/models"}],
            },
        ],
    },
}
REFUSED: Final[Mapping[str, Mapping[str, Any]]] = {
    "no TLS": {},
    "a name that is none": {"insecure": True, "shards": [{"name": "A b", "model": "m", "replicas": 1}]},
    "no time to drain": {"insecure": True, "drainSeconds": 0},
    "a port that is none": {"insecure": True, "metricsPort": "none"},
    "tenants without Redis": {"insecure": True, "discovery": "dns"},
    "a value that there is not": {"insecure": True, "replicaCount": 3},
    "a value of a part that there is not": {"insecure": True, "front": {"replica": 3}},
}


def check_chart() -> None:
    import helm_python as helm

    found = helm.lint(str(CHART))["errors"]
    # Without values it refuses to be installed: clients need TLS.
    assert all("clients need TLS" in error for error in found), found
    for name, values in VARIANTS.items():
        objects = list(_rendered(helm, values))
        for one in objects:
            _validate(one)
            for pod in _pods(one):
                _check_pod(pod)
        names = [(one["kind"], one["metadata"]["name"]) for one in objects]
        assert len(names) == len(set(names)), names
        _check_references(objects)
        _check_discovery(objects, values.get("discovery", "redis"))
        print(f"chart, {name}: {len(objects)} objects")
    for name, values in REFUSED.items():
        try:
            list(_rendered(helm, values))
        except helm.HelmError as error:
            print(f"chart, {name}: refused ({str(error).splitlines()[-1][-70:]})")
        else:
            raise AssertionError(f"{name} was not refused")
    for path in sorted(EXAMPLES.glob("*.yaml")):
        for one in yaml.safe_load_all(path.read_text()):
            _validate(one)
            print(f"{path.name}: {one['kind']}")


def _rendered(helm: Any, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(dict(values))
        texts = chart.render(dict(values), name="kvloom", namespace="llm")
    for text in texts.values():
        for one in yaml.safe_load_all(text):
            if one:
                yield one


def _validated(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The object, or the pods that an object of another kind has."""
    if one["apiVersion"] not in OF_OTHERS:
        yield one
        return
    group = one["spec"].get("leaderWorkerTemplate", {})
    for name in ("leaderTemplate", "workerTemplate"):
        if name in group:
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}, "spec": group[name]["spec"]}


def _validate(one: dict[str, Any]) -> None:
    """Raises ValueError for what the schemas of Kubernetes refuse."""
    import kubernetes_validate

    for valid in _validated(one):
        try:
            kubernetes_validate.validate(valid, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise ValueError(str(error)) from error


def _pods(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if one["kind"] in ("Deployment", "StatefulSet"):
        yield one["spec"]["template"]["spec"]


def _check_pod(pod: dict[str, Any]) -> None:
    """What an operator relies on, of every pod."""
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert "livenessProbe" in container
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert {"/tmp", "/var/lib/kvloom"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
        for match in re.findall(r"--within (\d+)s", json.dumps(container.get("lifecycle", {}))):
            assert int(match) < pod["terminationGracePeriodSeconds"], "the pod would be killed while streams move"


def _check_references(objects: list[dict[str, Any]]) -> None:
    """Selectors find the pods that they mean, and scalers the sets that there are."""
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in objects if list(_pods(one))]
    for one in objects:
        if one["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            spec = one["spec"]
            selector = spec.get("podSelector", spec.get("selector"))
            selector = selector.get("matchLabels", selector)
            assert any(selector.items() <= of_pod.items() for of_pod in labels), one["metadata"]["name"]
        if one["kind"] == "ScaledObject":
            target = one["spec"]["scaleTargetRef"]
            assert any(
                (other["kind"], other["metadata"]["name"]) == (target["kind"], target["name"]) for other in objects
            )


def _check_discovery(objects: list[dict[str, Any]], discovery: str) -> None:
    """Pods find one another: all have the Redis, or fronts the names and ports of services of shards."""
    containers = [container for one in objects for pod in _pods(one) for container in pod["containers"]]
    for container in containers:
        has_redis = any(one["name"] == "KVLOOM_REDIS_URL" for one in container["env"])
        assert has_redis == (discovery == "redis"), container["args"]
    args = [container["args"] for container in containers]
    named = [value for words in args for flag, value in itertools.pairwise(words) if flag == "--shards-at"]
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    shards = [one for one in objects if one["kind"] == "StatefulSet"]
    assert len(named) == (len(shards) if discovery == "dns" else 0)
    for address in named:
        name, _, port = address.partition(":")
        service = services[name]
        assert service["clusterIP"] == "None"
        assert service["publishNotReadyAddresses"]
        assert int(port) in [one["port"] for one in service["ports"]]
        [pod] = [pod for one in shards if one["spec"]["serviceName"] == name for pod in _pods(one)]
        assert ("--shard-port", port) in itertools.pairwise(pod["containers"][0]["args"])


def check_image(dockerfile: Path) -> None:
    """Runs what the first stage runs, with its folders replaced, and reads the SBOM."""
    with tempfile.TemporaryDirectory(prefix="kvloom-image-") as folder:
        build, target = Path(folder) / "build", Path(folder) / "kvloom"
        build.mkdir()
        for line in dockerfile.read_text().split("\nFROM ")[1].splitlines():
            if line.startswith("COPY "):
                *sources, place = line.split()[1:]
                for source in sources:
                    _copy(REPOSITORY / source, build / place / (Path(source).name if place == "./" else ""))
            elif line.startswith("RUN "):
                command = (
                    line[4:]
                    .replace("/build/", f"{build}/")
                    .replace("/opt/kvloom", str(target))
                    .replace("/opt/builder", f"{folder}/builder")
                )
                print(f"{dockerfile.name}: {line[4:100]}", flush=True)
                subprocess.run(["sh", "-ec", command], cwd=build, check=True, stdout=subprocess.DEVNULL)
        bill = json.loads((target / "sbom.json").read_text())
        pins = dict(re.findall(r"^(\S+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text().lower(), re.MULTILINE))
        found = {_key(one["name"]): one["version"] for one in bill["components"]}
        pins.pop("setuptools", None)  # Python before 3.12 puts its own into an environment
        wrong = {name: found[_key(name)] for name, pin in pins.items() if found.get(_key(name), pin) != pin}
        assert not wrong, wrong
        assert {"kvloom", "kvloom-fabric", "grpcio"} <= found.keys()
        has_torch = "torch" in found
        assert has_torch == (dockerfile.name == "torch.Dockerfile")
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) / 1e6
        print(f"{dockerfile.name}: {len(found)} components ({bill['bomFormat']} {bill['specVersion']}), {size:.0f} MB")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*"))
    else:
        shutil.copy(source, target)


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    parts = sys.argv[1:] or ["chart", "install", "images"]
    if "chart" in parts:
        check_chart()
    if "install" in parts:
        check_install(CHART, VARIANTS["cert-manager and KEDA"], _validate)
    if "images" in parts:
        check_image(REPOSITORY / "deploy" / "images" / "services.Dockerfile")
