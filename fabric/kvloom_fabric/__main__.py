"""The `kvloom` command, and `python -m kvloom_fabric SERVICE ...`, which runs one service in this process."""

from __future__ import annotations

import runpy
import sys
from typing import Final

from kvloom_fabric import import_from_root

SERVICES: Final = ("control", "edge_http", "orchestrator", "router", "shard_server", "safety_svc")


def main() -> None:
    """The console script `kvloom`."""
    import_from_root()
    from tools.cli.entry_point import main as run_command

    run_command()


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SERVICES:
        import_from_root()
        service = sys.argv.pop(1)
        runpy.run_module(service, run_name="__main__", alter_sys=True)
    else:
        main()
