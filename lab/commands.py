"""The `kvloom-lab` command and its subcommands."""

from __future__ import annotations

import click

from tools.cli.lazy_group import LazyGroup


@click.group(
    cls=LazyGroup,
    commands_at={
        "dst": "lab.dst.command:dst",
        "trace": "lab.traces.command:trace",
        "chaos": "lab.chaos.command:chaos",
        "redteam": "lab.redteam.command:redteam",
        "bench": "lab.bench.commands:bench",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
def main() -> None:
    """Test kvloom under faults, and measure and compare its parts, in a checkout of its repository.

    Options with an environment variable have the names of kvloom's own: --jobs of dst is KVLOOM_DST_JOBS.
    """
