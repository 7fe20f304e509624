"""vllm-router in front of HTTP workers: round robin, and cache-aware, which has the workers tokenize."""

from __future__ import annotations

from collections.abc import Sequence

from lab.bench.peers.peer import Peer, Site


def _argv(site: Site, policy: str) -> Sequence[str]:
    return (
        str(site.bin_dir / "vllm-router"), "--host", "127.0.0.1", "--port", str(site.port),
        "--worker-urls", *site.worker_urls, "--policy", policy,
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.metrics_port), "--log-level", "warning",
    )  # fmt: skip


VLLM_ROUTER = Peer(
    name="vllm-router",
    about="cache-aware, tokens from its workers",
    requirements=("vllm-router==0.1.17",),
    argv=lambda site: _argv(site, "cache_aware"),
)
VLLM_ROUTER_ROUND_ROBIN = Peer(
    name="vllm-router-rr",
    about="round robin: no placement, no tokens",
    requirements=("vllm-router==0.1.17",),
    argv=lambda site: _argv(site, "round_robin"),
)
