"""NVIDIA Dynamo's frontend with its KV router. It needs packages that are on NVIDIA's index only, so from PyPI alone it
does not install: it is in the table to say so."""

from __future__ import annotations

from collections.abc import Sequence

from tools.peers.peer import Peer, Site


def _argv(site: Site) -> Sequence[str]:
    return (
        str(site.bin_dir / "python"), "-m", "dynamo.frontend", "--http-host", "127.0.0.1",
        "--http-port", str(site.port), "--router-mode", "kv", "--discovery-backend", "file",
    )  # fmt: skip


DYNAMO = Peer(
    name="dynamo",
    about="KV router, tokenizes",
    requirement="ai-dynamo==1.6.1",
    argv=_argv,
    env={"DYN_DISCOVERY_BACKEND": "file", "HF_HUB_OFFLINE": "1", "DYN_LOG": "error"},
)
