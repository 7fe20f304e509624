"""The `kvloom` command."""

from __future__ import annotations

import importlib.metadata

import click

from tools.lazy_group import LazyGroup


@click.group(
    cls=LazyGroup,
    commands_at={
        "up": "tools.up:up",
        "down": "tools.up:down",
        "status": "tools.status:status",
        "restart": "tools.restart:restart",
        "drain": "tools.drain:drain",
        "undrain": "tools.drain:undrain",
        "logs": "tools.logs:logs",
        "chat": "tools.chat:chat",
        "explain": "tools.explain:explain",
        "models": "tools.models_command:models",
        "simulate": "tools.simulate.command:simulate_command",
        "dst": "tools.dst.command:dst",
        "chaos": "tools.chaos.command:chaos",
        "bench": "tools.cli:bench",
        "doctor": "tools.cli:doctor",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(importlib.metadata.version("kvloom"), prog_name="kvloom")
def main() -> None:
    """kvloom: a low-latency serving fabric for language models, on this machine.

    Every option has an environment twin: --http-port is KVLOOM_HTTP_PORT.
    """


@click.group(
    cls=LazyGroup,
    commands_at={
        "engine": "tools.bench_engine:bench_engine",
        "index": "tools.bench_index:bench_index",
        "conversations": "tools.bench_conversations:bench_conversations",
        "data-plane": "tools.bench_data_plane:bench_data_plane",
        "overload": "tools.bench_overload:bench_overload",
        "routing": "tools.simulate.study:study_command",
    },
)
def bench() -> None:
    """Measure engines, routing and the data plane."""


@click.group(cls=LazyGroup, commands_at={"engine": "tools.doctor:doctor_engine"})
def doctor() -> None:
    """Examine what runs on this machine."""


if __name__ == "__main__":
    main()
