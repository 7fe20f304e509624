"""smg (Shepherd Model Gateway) before HTTP workers."""

from __future__ import annotations

from collections.abc import Sequence

from tools.peers.peer import Peer, Site


def _argv(site: Site) -> Sequence[str]:
    return (
        str(site.bin_dir / "smg"), "launch", "--host", "127.0.0.1", "--port", str(site.port),
        "--worker-urls", *site.worker_urls, "--policy", "cache_aware",
        "--prometheus-port", str(site.metrics_port), "--log-level", "warn",
    )  # fmt: skip


SMG = Peer(name="smg", about="cache-aware by characters, HTTP workers", requirement="smg==1.13.0", argv=_argv)
