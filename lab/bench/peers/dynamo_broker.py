"""The broker through which Dynamo's processes exchange their events: `python dynamo_broker.py IN_PORT OUT_PORT`.

Without a broker each process of Dynamo binds its event sockets on all of the machine's interfaces; with one they bind
nothing. The broker runs in Dynamo's own virtualenv.
"""

from __future__ import annotations

import sys

import zmq


def main() -> None:
    context = zmq.Context()
    published, subscribed = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    published.bind(f"tcp://127.0.0.1:{sys.argv[1]}")
    subscribed.bind(f"tcp://127.0.0.1:{sys.argv[2]}")
    zmq.proxy(published, subscribed)


if __name__ == "__main__":
    main()
