"""LiteLLM's proxy, one process."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lab.bench.peers.peer import Peer, Site


def _argv(site: Site) -> Sequence[str]:
    models = [
        {
            "model_name": site.model,
            "litellm_params": {"model": f"openai/{site.model}", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for url in site.worker_urls
    ]
    settings = {
        "model_list": models,
        "litellm_settings": {"drop_params": True, "telemetry": False, "request_timeout": 600},
        "router_settings": {"routing_strategy": "simple-shuffle"},
    }
    path = site.work_dir / "litellm.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return (
        str(site.bin_dir / "litellm"), "--config", str(path), "--host", "127.0.0.1", "--port", str(site.port),
        "--num_workers", "1",
    )  # fmt: skip


LITELLM = Peer(
    name="litellm",
    about="Python proxy",
    requirements=("litellm[proxy]==1.106.0",),
    argv=_argv,
    env=lambda _: {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    },
    max_share=0.25,
)
