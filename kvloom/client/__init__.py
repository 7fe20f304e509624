"""The Python SDK: `kvloom.Client` and its parts.

client.py                `Client`: generate, complete, embed, plan, explain, list_models, moderate, cancel
sync_client.py           `SyncClient`, its synchronous twin
delta_stream.py          `DeltaStream`, which a caller reads, and how leaving it cancels the request
answer.py                `Answer`, a whole answer
retries.py               which failed requests are repeated, and when
option_help.py           the options of a request in `help()`
credentials.py           how a client shows who it is: an API key, and TLS
generate_request.py      the options of `Client.generate`, checked and turned into the wire's message
conversation_options.py  the options of a conversation: messages, tools, and the choice among them
embedding.py             `Embedding`, the vector of a text, and the requests for them; and `Moderation`
generation.py            `Delta`, what a caller reads, and the buffer in which deltas wait for the reader
router_channels.py       unary calls to one of several routers
resumed_call.py          `Generate` by RPC that survives lost connections and lost routers
migrating_generation.py  the progress of such an answer, and the request that continues it
router_routes.py         which router such an answer asks next
"""
