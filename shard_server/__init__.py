"""The process that serves one engine to routers over gRPC.

__main__.py            `python -m shard_server`: parses the arguments and serves
metric_table.py        the metrics, one record each
server.py              starts, drains and stops the parts of the process in order
spot_notice.py         notice that the machine is about to be taken away: a file, or a signal
shard_servicer.py      the gRPC service: the router's stream, GetInfo and Drain
connection.py          one router's stream: its slots and the frames that wait to be written
step_frames.py         how a step frame is filled, and how waiting frames are merged
engine_multiplexer.py  between one engine and all routers: every step becomes one frame per router
sequence_admission.py  admits or rejects what routers submit
submits.py             checks a submit and turns it into engine requests
served_adapters.py     the adapters of the engine: what routers are told of them, and which submits may use them
live_sequences.py      the sequences that have not finished
load_reporter.py       when and what load is reported to each router
tracing.py             spans of sequences, for an OpenTelemetry collector
metrics.py             the Prometheus metrics of a shard
engines/               the Engine protocol, and the simulator, torch and TensorRT-LLM behind it
"""

import kvloom_common.transport.grpc_settings as _  # noqa: F401  (before anything imports gRPC)
