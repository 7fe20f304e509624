"""The command `python -m control --config FILE [--port N]`."""

from __future__ import annotations

import kvloom_common.process.quick_start  # noqa: F401  # isort: split
from control.service.server import serve
from kvloom_common.backend import run_backend


def main() -> None:
    run_backend("control", "control", "Serve kvloom's tenants, keys and limits.", serve)


if __name__ == "__main__":
    main()
