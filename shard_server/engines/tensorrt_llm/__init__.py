"""The `Engine` protocol over an in-process `tensorrt_llm.LLM`.

engine.py            TensorRtLlmEngine: start, submit, steps, health and close
launch.py            starts the LLM and finds out its number of blocks
settings.py          what kvloom itself reads of the library's options
llm_options.py       the configuration as arguments of `tensorrt_llm.LLM`
running_requests.py  one task per request, which reads its output until it ends
output_buffer.py     the unread output of all requests, within bounds
requests/            one request: its sampling parameters, guide and adapter, and the deltas of its output
kv_cache/            KV events with the hashes that routers compute
stats.py             the load, from our own counts and TensorRT-LLM's statistics
reports.py           notices when statistics or KV events no longer come
health.py            detects a dead or hanging engine
loop_watchdog.py     ends the process when the library blocks the event loop
daemon_thread.py     threads for the library's blocking calls
disaggregation.py    prefill on one engine and decode on another
library_rows.py      compares the installed library with what the adapter uses
api.py               the types and symbols of the library that the adapter uses
known_names.py       the library's names, against which tests check the adapter
versions.py          which release has which of them, and how it behaves
"""
