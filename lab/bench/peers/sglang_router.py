"""sglang-router in front of HTTP workers."""

from __future__ import annotations

from collections.abc import Sequence

from lab.bench.peers.peer import Peer, Site


def _argv(site: Site) -> Sequence[str]:
    return (
        str(site.bin_dir / "sglang-router"), "launch", "--host", "127.0.0.1", "--port", str(site.port),
        "--worker-urls", *site.worker_urls, "--policy", "cache_aware",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.metrics_port), "--log-level", "warn",
    )  # fmt: skip


SGLANG_ROUTER = Peer(
    name="sglang-router", about="cache-aware by characters", requirements=("sglang-router==0.3.2",), argv=_argv
)
