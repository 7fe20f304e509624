"""The command `python -m orchestrator --config FILE [--port N]`."""

from __future__ import annotations

import kvloom_common.process.quick_start  # noqa: F401  # isort: split
from kvloom_common.backend import run_backend
from orchestrator.service.server import serve


def main() -> None:
    run_backend("orchestrator", "orchestrator", "Store responses, files and batches.", serve)


if __name__ == "__main__":
    main()
