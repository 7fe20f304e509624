"""NVIDIA Dynamo's frontend with its KV router, in front of Dynamo's own simulated engines (its mocker).

A performance profile makes the mocker's decode steps as long as the workload's, and its prefill instantaneous. Its
tokens are random, so that they cannot say when they were made, and no latencies are measured.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from lab.bench.peers.peer import Peer, Site

_BROKER: Final = Path(__file__).with_name("dynamo_broker.py")
_NUM_ENGINES: Final = 2
_UNPACED: Final = 1_000_000
"""Speed-up over Dynamo's default engine for unpaced workloads, in microseconds per step. A profile's steps take at
least a millisecond."""


def _argv(site: Site) -> Sequence[str]:
    return (
        str(site.bin_dir / "python"), "-P", "-m", "dynamo.frontend", "--http-host", "127.0.0.1",
        "--http-port", str(site.port), "--router-mode", "kv", "--discovery-backend", "file",
    )  # fmt: skip


def _env(site: Site) -> Mapping[str, str]:
    events_in, events_out = (f"tcp://127.0.0.1:{port}" for port in site.engine_ports)
    hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_HTTP_RPC_HOST", "DYN_SYSTEM_HOST")
    return {
        **dict.fromkeys((*hosts, "DYN_EVENT_PLANE_HOST"), "127.0.0.1"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(site.work_dir / "discovery"),
        "DYN_ZMQ_BROKER_ENABLED": "1",
        "DYN_ZMQ_BROKER_URL": f"xsub={events_in} , xpub={events_out}",
        "DYN_SELF_HOST_METADATA": "0",
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(site.work_dir),  # it keeps copies of the tokenizer there
    }


def _engines(site: Site) -> Sequence[Sequence[str]]:
    python = str(site.bin_dir / "python")
    mocker = (
        python, "-P", "-m", "dynamo.mocker", "--model-path", str(_model_without_end(site)), "--model-name", site.model,
        "--num-workers", str(_NUM_ENGINES), "--max-num-seqs", "4096", "--max-num-batched-tokens", "65536",
        "--num-gpu-blocks-override", "65536", "--discovery-backend", "file", *_pace(site),
    )  # fmt: skip
    return [(python, "-P", str(_BROKER), *map(str, site.engine_ports)), mocker]


def _pace(site: Site) -> Sequence[str]:
    if not site.step_ms:
        return ("--speedup-ratio", str(_UNPACED))
    path = site.work_dir / "pace.npz"
    step_ms = site.step_ms * site.decode_every
    np.savez(
        path,
        prefill_isl=[0.0, 1e6],
        prefill_ttft_ms=[0.001, 0.001],
        decode_active_kv_tokens=[0.0, 1e9],
        decode_context_length=[0.0, 1e6],
        decode_itl=[[step_ms, step_ms], [step_ms, step_ms]],
    )
    return ("--planner-profile-data", str(path))


def _model_without_end(site: Site) -> Path:
    """A copy of the model's files without an end-of-sequence token: the mocker samples from all tokens."""
    model_dir = site.work_dir / "model"
    model_dir.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(site.model_path / name, model_dir / name)
    config = json.loads((site.model_path / "config.json").read_text())
    config["eos_token_id"] = config["vocab_size"]
    (model_dir / "config.json").write_text(json.dumps(config))
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": config["vocab_size"]}))
    return model_dir


DYNAMO = Peer(
    name="dynamo",
    about="KV router by tokens, tokenizes; before its mocker",
    # Of its dependencies, `aisimulate` is not on PyPI, and the frontend and the mocker need only these.
    bare_requirements=("ai-dynamo==1.6.1",),
    requirements=(
        "ai-dynamo-runtime==1.6.1", "msgspec==0.22.0", "numpy==2.4.6", "packaging==26.3", "prometheus-client==0.26.0",
        "pyyaml==6.0.3", "pyzmq==27.3.0",
    ),
    argv=_argv,
    env=_env,
    engines=_engines,
    has_stamps=False,
)  # fmt: skip
