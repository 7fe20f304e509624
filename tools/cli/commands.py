"""The `kvloom` command and its subcommands."""

from __future__ import annotations

import importlib.metadata
from typing import Final

import click

from tools.cli.lazy_group import LazyGroup


@click.group(
    cls=LazyGroup,
    sections={
        "Run a fabric": {
            "up": "tools.cli.up:up",
            "down": "tools.cli.up:down",
            "status": "tools.cli.status:status",
            "top": "tools.cli.top:top",
            "restart": "tools.cli.restart:restart",
            "reload": "tools.cli.restart:reload",
            "drain": "tools.cli.drain:drain",
            "undrain": "tools.cli.drain:undrain",
            "scale-in": "tools.cli.drain:scale_in",
            "logs": "tools.cli.logs:logs",
            "backup": "tools.cli.backup:backup",
            "restore": "tools.cli.backup:restore",
            "metrics": "tools.cli.metrics:metrics",
            "scaler": "tools.scaler.command:scaler",
            "epp": "tools.gateway.command:epp",
            "secret": "tools.cli.secret:secret",
            "incident": "tools.cli.incident:incident",
            "doctor": "tools.cli.commands:doctor",
        },
        "Ask it": {
            "chat": "tools.cli.chat:chat",
            "explain": "tools.cli.explain:explain",
        },
        "Models": {
            "models": "tools.cli.models:models",
            "cache": "tools.cli.cache:cache",
            "receipts": "tools.cli.commands:receipts",
            "audit": "tools.cli.commands:audit",
            "safety": "tools.cli.commands:safety",
        },
        "Tenants": {
            "orgs": "tools.cli.tenants.orgs:orgs",
            "projects": "tools.cli.tenants.projects:projects",
            "users": "tools.cli.tenants.users:users",
            "keys": "tools.cli.keys:keys",
            "limits": "tools.cli.tenants.limits:limits",
            "prices": "tools.cli.tenants.prices:prices",
            "usage": "tools.usage.command:usage",
        },
        "Study and measure": {
            "simulate": "tools.simulate.command:simulate_command",
            "plan": "tools.plan.command:plan",
            "whatif": "tools.whatif.command:whatif",
            "bench": "tools.cli.commands:bench",
        },
    },
    moved_to={"dst": "kvloom-lab dst", "chaos": "kvloom-lab chaos"},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(importlib.metadata.version("kvloom"), prog_name="kvloom")
def main() -> None:
    """kvloom: a low-latency serving fabric for language models, on this machine.

    Every option can be set with an environment variable: --http-port is KVLOOM_HTTP_PORT.
    """


BENCHES_IN_THE_LAB: Final = (
    "data-plane",
    "index",
    "routing",
)
"""These were commands of `kvloom bench` before 0.3.0. Others were of one use, and are gone: brownout, conversations,
directory, fair-queue, fairness, kv-shares, memory, overload, preemption, spot-notice, tenants and tenant-timing."""


@click.group(
    cls=LazyGroup,
    commands_at={"engine": "tools.bench.engine.command:bench_engine", "load": "tools.bench.load:bench_load"},
    moved_to={name: f"kvloom-lab bench {name}" for name in BENCHES_IN_THE_LAB},
)
def bench() -> None:
    """Measure what an engine reaches on this machine, and a running fabric under load."""


@click.group(
    cls=LazyGroup,
    commands_at={
        "deployment": "tools.cli.deployment:doctor_deployment",
        "engine": "tools.doctor.command:doctor_engine",
        "security": "tools.doctor.security:doctor_security",
        "plugins": "tools.doctor.plugins:doctor_plugins",
    },
)
def doctor() -> None:
    """Check that this machine can run kvloom, what is wrong with a running fleet, and that it is closed to strangers,
    and list plugins."""


@click.group(
    cls=LazyGroup,
    commands_at={
        "key": "tools.receipts.command:key",
        "collect": "tools.cli.collect_receipts:collect_receipts",
        "save": "tools.receipts.command:save",
        "verify": "tools.receipts.command:verify",
    },
)
def receipts() -> None:
    """Save and verify the receipts of answers (docs/how-to/receipts.md)."""


@click.group(
    cls=LazyGroup,
    commands_at={
        "verify": "tools.audit.command:verify",
        "show": "tools.audit.command:show",
        "abuse": "tools.audit.command:abuse",
        "review": "tools.audit.command:review",
        "uphold": "tools.audit.command:uphold",
        "reverse": "tools.audit.command:reverse",
        "reproduce": "tools.audit.reproduce:reproduce",
        "export": "tools.audit.command:export",
        "erase": "tools.audit.command:erase",
    },
)
def audit() -> None:
    """Verify, show and erase what the safety policy has found (docs/operate/audit.md)."""


@click.group(cls=LazyGroup, commands_at={"whatif": "tools.safety.command:whatif"})
def safety() -> None:
    """Try a safety policy on recorded requests (docs/operate/safety.md)."""


if __name__ == "__main__":
    main()
