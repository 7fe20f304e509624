"""smg (Shepherd Model Gateway): in front of HTTP workers it relays, in front of gRPC workers it tokenizes and
detokenizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvloom_common.text.tokenizer import ModelTokenizer
from lab.bench.peers.peer import Peer, Site
from shard_server.engines.sim_tokens import TICK_SECONDS, stamp_token_ids

_REQUIREMENTS: Final = ("smg==1.13.0", "smg-grpc-proto==0.4.28")
_WORKER: Final = Path(__file__).with_name("smg_grpc_servicer.py")


def _argv(site: Site, *worker_urls: str) -> Sequence[str]:
    return (
        str(site.bin_dir / "smg"), "launch", "--host", "127.0.0.1", "--port", str(site.port),
        "--worker-urls", *worker_urls, "--worker-startup-check-interval", "1", "--policy", "cache_aware",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.metrics_port), "--log-level", "warn",
    )  # fmt: skip


def _grpc_argv(site: Site) -> Sequence[str]:
    urls = [f"grpc://127.0.0.1:{port}" for port in site.engine_ports]
    return (*_argv(site, *urls), "--model-path", str(site.model_path))


def _grpc_engines(site: Site) -> Sequence[Sequence[str]]:
    tokenizer = ModelTokenizer.load(site.model_path)
    try:
        stamps, vocab_size = stamp_token_ids(tokenizer.token_texts), tokenizer.vocab_size
        eos_token_ids = sorted(tokenizer.eos_token_ids)
    finally:
        tokenizer.close()
    order = site.work_dir / "engine.json"
    order.write_text(
        json.dumps(
            {
                "model": site.model, "model_path": str(site.model_path), "vocab_size": vocab_size,
                "eos_token_ids": eos_token_ids, "step_ms": site.step_ms, "decode_every": site.decode_every,
                "tick_seconds": TICK_SECONDS, "stamp_token_ids": stamps,
            }
        )
    )  # fmt: skip
    python = str(site.bin_dir / "python")
    return [(python, "-P", str(_WORKER), str(order), str(port)) for port in site.engine_ports]


SMG = Peer(
    name="smg",
    about="HTTP workers, cache-aware by characters",
    requirements=_REQUIREMENTS,
    argv=lambda site: _argv(site, *site.worker_urls),
)
SMG_GRPC = Peer(
    name="smg-grpc",
    about="gRPC workers, cache-aware, tokenizes",
    requirements=_REQUIREMENTS,
    argv=_grpc_argv,
    engines=_grpc_engines,
)
