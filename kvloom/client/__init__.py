"""The Python SDK: `kvloom.Client` and its parts.

client.py                `Client`: generate, plan, explain, list_models, cancel
credentials.py           how a client shows who it is: an API key, and TLS
generate_request.py      the options of `Client.generate`, checked and turned into the wire's message
generation.py            `Delta`, what a caller reads, and the buffer in which deltas wait for the reader
router_channels.py       unary calls to one of several routers
resumed_call.py          `Generate` by RPC that survives lost connections and lost routers
migrating_generation.py  the progress of such an answer, and the request that continues it
router_routes.py         which router such an answer asks next
"""

from kvloom.client.client import Client as Client

__all__ = ["Client"]
