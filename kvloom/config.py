"""Configuration: one typed tree for every process, from a TOML (or JSON) file.

    config = load_config(Path("kvloom.toml"))

Unknown keys and wrong types are errors that name the key. Command-line flags and their environment twins
(`KVLOOM_...`) are applied on top by `tools`; services get the result as one file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Address = Annotated[str, Meta(pattern=r"^[^\s,/]+:[0-9]{1,5}$")]
"""host:port"""


class ConfigError(Exception):
    """The file cannot be used; the message names the file, the key and what is wrong."""


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class ModelConfig(Section):
    name: str = "smollm2-135m-instruct"
    """What clients call it."""
    path: str = ""
    """Directory with config.json, *.safetensors, tokenizer.json and chat template. Empty: `kvloom up` provides the
    built-in model."""
    sha256: str = ""
    """Of the model's files (`kvloom models add` prints it); checked before they are loaded. Empty: not checked."""


class ResumeConfig(Section):
    """Streams that can be taken up again after their connection was lost (docs/http-api.md, docs/grpc-api.md)."""

    grace_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """How long a response waits for its client to come back; then it is cancelled and forgotten. 0: never waits."""
    by_default: bool = False
    """Whether streams are resumable whose clients do not say (`x-kvloom-resume`, `GenerateRequest.resumable`). Those
    that break off for good cost up to `grace_seconds` of generation then."""
    max_unattended: PositiveInt = 1024
    """Running answers that no client reads; of more, those that have been waiting the longest are cancelled."""
    max_response_bytes: Annotated[int, Meta(ge=4096)] = 4 * 2**20
    """Events kept of one response; the oldest are forgotten first."""
    max_bytes: Annotated[int, Meta(ge=4096)] = 256 * 2**20
    """Events kept of all responses of a process."""


class EdgeResumeConfig(ResumeConfig):
    commit_seconds: Annotated[float, Meta(ge=0, le=10)] = 0.2
    """How long an event of a resumable stream may wait until Redis has it, so that another edge can go on right behind
    what the client has seen when this one dies; mostly it takes less than a millisecond. 0: events do not wait, and
    Redis gets them ten times a second: a client that has seen more than Redis cannot go on then."""
    max_journal_bytes: Annotated[int, Meta(ge=2 * 2**20)] = 32 * 2**20
    """Of an edge's latest events in Redis, for the time when it has died."""
    advertised_address: str = ""
    """host:port where the other edges reach this one. Empty: where it listens; set it when `edge.host` is a wildcard,
    else only this edge can resume its streams. Of edges that share a port only the host is taken, for each has a port
    of its own besides."""


class EdgeConfig(Section):
    host: str = "127.0.0.1"
    port: Port = 8080
    num_edges: Annotated[int, Meta(ge=1, le=256)] = 1
    """How many `kvloom up` starts; they share the port."""
    colocate: bool = False
    """`kvloom up` puts a router into each edge's process, instead of starting `router.num_routers`."""
    max_body_bytes: PositiveInt = 4 * 2**20
    max_header_bytes: PositiveInt = 16 * 2**10
    max_messages: PositiveInt = 4096
    max_buffered_bytes: PositiveInt = 256 * 2**10
    """What may wait for a slow reader, per stream; beyond that the request is cancelled."""
    max_concurrent_requests: PositiveInt = 8192
    max_connections: PositiveInt = 16_384
    """Open at a time; more get a 503 and are closed."""
    max_pending_body_bytes: Annotated[int, Meta(ge=4 * 2**20)] = 256 * 2**20
    """Of all bodies together that are being received or read; beyond that requests are refused at once."""
    header_timeout_seconds: PositiveFloat = 10.0
    """From a connection's begin, or the first byte of a later request, to the end of its headers."""
    body_timeout_seconds: PositiveFloat = 60.0
    """From the end of the headers to the end of the body."""
    request_timeout_seconds: PositiveFloat = 600.0
    drain_timeout_seconds: PositiveFloat = 30.0
    stays_on_cpu: bool = True
    """The event loop stays on one CPU as long as nothing else keeps that busy (kvloom/process/cpu_affinity.py)."""
    routers: list[Address] = []
    """host:port of each. Empty: the one of [router], and all that announce themselves in Redis."""
    reattach_seconds: Annotated[float, Meta(ge=0, le=600)] = 10.0
    """How long an answer that has lost its router may look for one that goes on with it. 0: it fails at once."""
    resume: EdgeResumeConfig = msgspec.field(default_factory=EdgeResumeConfig)


class PlacementConfig(Section):
    policy: str = "ect"
    """A name in router/core/placement: "ect", "round_robin", "least_requests" ..."""
    prefill_chunks: bool = True
    """Whether the default policy has long prompts prefilled in prefill chunks, between which shorter ones go first
    (docs/routing.md). Engines must keep prefixes in their cache."""


class DecisionLogConfig(Section):
    """Which placements are remembered for `kvloom explain`, and whether they are written to a file."""

    sample_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Of the requests, chosen by a hash of their ids; 0: none."""
    max_remembered: PositiveInt = 4096
    """The latest requests, in memory."""
    path: str = ""
    """JSON lines (docs/routing-decisions.md) are appended here, one for each remembered request that ended. Empty: no
    file. One router a file."""
    max_bytes: Annotated[int, Meta(ge=65_536)] = 64 * 2**20
    """Of the file; what was there before becomes `path` + ".1"."""


class OverloadConfig(Section):
    """What happens when more is asked for than the shards can do (docs/reliability.md)."""

    sheds_early: bool = True
    """Refuse requests on arrival that would wait longer than they may, judged by the rate at which the queue drains,
    and drop those in the queue that cannot be answered before their deadline. Without it only `max_queued_requests`
    and the clock decide."""
    outage_patience_seconds: Annotated[float, Meta(ge=0)] = 5.0
    """How long requests that were admitted wait for a shard when the last one has gone. New ones are refused at
    once."""
    ramp_start_requests: PositiveInt = 8
    """What a shard that comes (back) while requests wait is sent at first; two more with every first token that it
    produces, so that it is not run over."""


class HealthConfig(Section):
    """When the router suspects a shard: then it gets no new work, what runs there goes on elsewhere, and requests for
    one token find out when it is well again (docs/reliability.md)."""

    enabled: bool = True
    stall_seconds: PositiveFloat = 5.0
    """A shard that has something to do and makes no progress for so long is suspected; the time that prefill should
    take is added."""
    slow_factor: Annotated[float, Meta(gt=1)] = 10.0
    """So is one whose tokens come so many times slower than the median of the shards that serve the same model."""
    slow_seconds: PositiveFloat = 10.0
    """Of decoding, before that is judged."""
    max_failures: PositiveInt = 5
    """So is one whose engine has failed so many requests in a row."""
    max_suspected_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Of a model's shards; more are not suspected, whatever they do."""
    probe_seconds: PositiveFloat = 1.0
    """To the first probe of a suspected shard; every one that is missed doubles it."""
    max_probe_seconds: PositiveFloat = 30.0
    num_probes: PositiveInt = 3
    """In a row that must be answered in time."""


class RouterConfig(Section):
    host: str = "127.0.0.1"
    port: Port = 8081
    num_routers: Annotated[int, Meta(ge=1, le=256)] = 1
    """How many `kvloom up` starts; they share the port, and each has one of its own besides."""
    max_queued_requests: PositiveInt = 1024
    """Waiting for a shard to take them; beyond that a request is refused at once."""
    max_queue_seconds: PositiveFloat = 60.0
    request_timeout_seconds: PositiveFloat = 600.0
    max_attempts: PositiveInt = 3
    max_prompt_tokens: PositiveInt = 262_144
    max_streams_per_connection: PositiveInt = 4096
    """RPCs open at a time on one HTTP/2 connection; more wait at the client."""
    drain_timeout_seconds: PositiveFloat = 30.0
    stays_on_cpu: bool = True
    """As the edge's."""
    placement: PlacementConfig = msgspec.field(default_factory=PlacementConfig)
    health: HealthConfig = msgspec.field(default_factory=HealthConfig)
    decision_log: DecisionLogConfig = msgspec.field(default_factory=DecisionLogConfig)
    overload: OverloadConfig = msgspec.field(default_factory=OverloadConfig)
    resume: ResumeConfig = msgspec.field(default_factory=ResumeConfig)


class SimConfig(Section):
    """Timing of the simulated engine."""

    step_ms: Annotated[float, Meta(ge=0)] = 20.0
    prefill_tokens_per_second: PositiveFloat = 20_000.0
    decode_every: PositiveInt = 1
    """A sequence has a new token in every so many-th step, counted from its first token: many slow readers that are not
    in lockstep."""
    stamp_tokens: bool = False
    """Tokens tell when they were made, for `kvloom bench data-plane`; answers then depend on the clock."""
    shards_per_process: PositiveInt = 1
    """How many `kvloom up` puts into one process: a fleet of hundreds on one machine."""


class SpeculationConfig(Section):
    """Drafts are looked up in a sequence's own tokens and verified in the step that decodes it: the answer is the same,
    only sooner where it repeats something."""

    max_draft_tokens: Annotated[int, Meta(ge=0, le=16)] = 0
    """Tokens drafted for a sequence in a step, at most; 0: no speculation."""
    max_ngram: Annotated[int, Meta(ge=1, le=8)] = 3
    """The longest run of last tokens that is looked for."""


class TorchConfig(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: an NVIDIA GPU, with torch's CUDA build (docs/performance-gpu.md); without one a shard does not start."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    weights: Literal["dtype", "int8"] = "dtype"
    """Of the linear layers. int8: a scale per output channel; products are of int8 rows, the rest is computed in
    `dtype`. docs/engines.md says what it brings and what it costs in quality."""
    num_threads: Annotated[int, Meta(ge=0)] = 0
    """0: the machine's cores divided by `num_shards`, at least 1."""
    deterministic: bool = True
    """Results do not depend on the batch, bit for bit (docs/engines.md says what it costs). Without it an answer that
    fails over goes on from the tokens delivered, but not always with the tokens it would have had."""
    speculation: SpeculationConfig = msgspec.field(default_factory=SpeculationConfig)


class TensorRtKvCacheConfig(Section):
    free_gpu_memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Of what is free once the weights are loaded. With `shard.num_blocks` the smaller of the two holds."""
    dtype: str = "auto"
    """auto, fp8, ..."""
    block_reuse: bool = True
    partial_reuse: bool = True
    host_cache_bytes: Annotated[int, Meta(ge=0)] = 0
    """Second tier in host memory; 0: none."""
    event_buffer_max_size: PositiveInt = 65_536
    """KV events that may wait for the shard; beyond that they are lost and the shard resynchronises."""


class TensorRtSpeculationConfig(Section):
    method: Literal["off", "ngram", "eagle3", "mtp", "draft_target"] = "off"
    max_draft_len: PositiveInt = 4
    max_matching_ngram_size: PositiveInt = 4
    """ngram only. The pool of n-grams is never shared between requests."""
    draft_model: str = ""
    """Directory or name of the draft model: eagle3 and draft_target."""


class TensorRtLoraConfig(Section):
    enabled: bool = False
    max_rank: PositiveInt = 64
    max_loras: PositiveInt = 4
    max_cpu_loras: PositiveInt = 32
    adapters: dict[str, str] = {}
    """Directories by adapter name."""
    target_modules: list[str] = []
    """Which modules adapters may change. Empty: all, and memory for all."""


class TensorRtCacheTransceiverConfig(Section):
    """Moves KV between a prefill and a decode engine."""

    backend: Literal["off", "DEFAULT", "UCX", "NIXL", "MPI"] = "off"
    max_tokens_in_buffer: Annotated[int, Meta(ge=0)] = 0
    """0: the library's default."""
    timeout_ms: PositiveInt = 60_000
    """Without one, a peer that cannot be reached blocks the engine."""


class TensorRtLlmConfig(Section):
    """What is passed to TensorRT-LLM (docs/tensorrt-llm.md). Block size, blocks, batch and window are `shard`'s."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    attention_dp: bool = False
    dtype: str = "auto"
    trust_remote_code: bool = False
    max_num_tokens: PositiveInt = 8192
    """Tokens of one step at most; without chunked prefill also of a prompt."""
    chunked_prefill: bool = True
    overlap_scheduler: bool = True
    cuda_graphs: bool = True
    stream_interval: PositiveInt = 1
    guided_decoding_backend: Literal["off", "xgrammar", "llguidance"] = "off"
    sampler_type: Literal["auto", "TorchSampler", "TRTLLMSampler"] = "auto"
    penalties: bool = False
    """Whether the chosen sampler applies penalties (docs/tensorrt-llm.md). Off: such requests are refused by name."""
    extra_llm_options: dict[str, Any] = {}
    """Further arguments of `LLM`, as they are."""
    start_timeout_seconds: PositiveFloat = 3600.0
    probe_interval_seconds: PositiveFloat = 30.0
    """An idle engine generates one token this often, to show that it still can."""
    probe_timeout_seconds: PositiveFloat = 30.0
    stall_timeout_seconds: PositiveFloat = 120.0
    """An engine that has work and shows no progress for this long has died."""
    cancel_timeout_seconds: PositiveFloat = 10.0
    """A cancelled sequence that TensorRT-LLM does not end within this time is cut off."""
    unread_timeout_seconds: PositiveFloat = 30.0
    """When nobody reads the engine's news for this long, its sequences are aborted."""
    kv_cache: TensorRtKvCacheConfig = msgspec.field(default_factory=TensorRtKvCacheConfig)
    speculation: TensorRtSpeculationConfig = msgspec.field(default_factory=TensorRtSpeculationConfig)
    lora: TensorRtLoraConfig = msgspec.field(default_factory=TensorRtLoraConfig)
    cache_transceiver: TensorRtCacheTransceiverConfig = msgspec.field(default_factory=TensorRtCacheTransceiverConfig)


class ShardConfig(Section):
    engine: Literal["torch", "sim", "tensorrt_llm"] = "torch"
    num_shards: PositiveInt = 2
    """How many `kvloom up` starts."""
    host: str = "127.0.0.1"
    block_size: PositiveInt = 16
    num_blocks: Annotated[int, Meta(ge=0)] = 0
    """KV blocks; 0: the engine's default for the model."""
    max_batch: PositiveInt = 64
    max_model_len: Annotated[int, Meta(ge=0)] = 0
    """0: the model's own window."""
    max_prefill_tokens_per_step: PositiveInt = 512
    """Prompts are prefilled in chunks of this many tokens, so that running sequences are not stalled. The torch engine
    takes fewer where so many would take more than a second."""
    max_waiting: PositiveInt = 1024
    queue_order: Literal["fcfs", "shortest_prefill"] = "fcfs"
    """Which waiting sequence is admitted next: the first that came, or the one with the least left to prefill, aged so
    that nobody is overtaken for ever (docs/engines.md)."""
    drain_timeout_seconds: PositiveFloat = 30.0
    sim: SimConfig = msgspec.field(default_factory=SimConfig)
    torch: TorchConfig = msgspec.field(default_factory=TorchConfig)
    tensorrt_llm: TensorRtLlmConfig = msgspec.field(default_factory=TensorRtLlmConfig)


class SafetyConfig(Section):
    host: str = "127.0.0.1"
    port: Port = 0
    policy_file: str = ""
    """TOML rules, reloaded when it changes. Empty: the built-in policy."""
    answer_mode: Literal["gate", "async", "off"] = "gate"
    """gate: text is held until it is screened. async: text is sent at once, the request halted on a hit."""
    on_unavailable: Literal["refuse", "allow"] = "refuse"
    """What happens to requests while the safety service cannot be reached."""
    patience_seconds: Annotated[float, Meta(ge=0)] = 5.0
    """How long they wait for one that has gone before that happens, nothing unscreened being shown. 0: not at all."""
    drain_timeout_seconds: PositiveFloat = 10.0
    """How long a service that has a successor goes on with what its routers have begun with it."""


class RedisConfig(Section):
    url: str = ""
    """redis://host:port/db. Empty: `kvloom up` starts an embedded server."""
    key_prefix: str = "kvloom"


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


class KvloomConfig(Section):
    data_dir: str = ""
    """Where `kvloom up` keeps logs, sockets and converted models. Empty: ~/.kvloom"""
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    edge: EdgeConfig = msgspec.field(default_factory=EdgeConfig)
    router: RouterConfig = msgspec.field(default_factory=RouterConfig)
    shard: ShardConfig = msgspec.field(default_factory=ShardConfig)
    safety: SafetyConfig = msgspec.field(default_factory=SafetyConfig)
    redis: RedisConfig = msgspec.field(default_factory=RedisConfig)
    log: LogConfig = msgspec.field(default_factory=LogConfig)


def load_config(path: Path | None) -> KvloomConfig:
    """Read a .toml or .json file; None gives the defaults. Raises ConfigError."""
    if path is None:
        return KvloomConfig()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(raw, type=KvloomConfig)
        return msgspec.toml.decode(raw, type=KvloomConfig)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def dump_config(config: KvloomConfig, path: Path) -> None:
    """Write the whole tree as JSON, for the processes that `kvloom up` starts."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
