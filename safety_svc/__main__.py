"""The command `python -m safety_svc --config FILE [--port N]`."""

from __future__ import annotations

import kvloom_common.process.quick_start  # noqa: F401  # isort: split
from kvloom_common.backend import run_backend
from safety_svc.server import serve


def main() -> None:
    run_backend("safety_svc", "safety", "Serve kvloom's safety service.", serve)


if __name__ == "__main__":
    main()
