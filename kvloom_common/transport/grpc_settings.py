"""Settings that gRPC reads from the environment when it is imported. Each service's package imports this module first;
the SDK does not, since its process is the user's.

gRPC's event engine reads sockets with its own pool of threads. Without it, the thread that waits for completions reads
them, and a message takes two thread switches fewer (docs/notes/performance/experiments.md).
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
