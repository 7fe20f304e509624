"""The configuration of all processes: one typed tree, read from a TOML (or JSON) file.

    config = load_config(Path("kvloom.toml"))

Unknown keys and wrong types are errors that name the key. `tools` applies command-line flags and environment variables
(`KVLOOM_...`) on top; the services get the result as one file. docs/configuration.md shows every key.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from kvloom_common.kv_share import MAX_KV_SHARES_PERCENT
from kvloom_common.private_file import write_private_file
from kvloom_common.unknown_key import meant_key

Port = Annotated[int, Meta(ge=0, le=65535)]
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Address = Annotated[str, Meta(pattern=r"^[^\s,/]+:[0-9]{1,5}$")]
"""host:port"""
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@,A-Z]+")
_CLASS_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""As a browser writes it: a scheme, a host and, unless it is the scheme's usual one, a port, in lower case."""
_WEBHOOK: Final = re.compile(r"https?://[^\s/?#@]+(/[^\s#]*)?")


class ConfigError(Exception):
    """The file cannot be used. The message names the file, the key and the fault."""


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The base of all sections: unknown keys are errors."""


class GenerationDefaults(Section):
    """How answers are generated where a request does not say it. What is not set here either has OpenAI's default."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    max_tokens: PositiveInt | None = None


ADAPTER_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._/@-]{0,127}$"
"""Without ':', which separates a model's name from its adapter's."""
AdapterName = Annotated[str, Meta(pattern=ADAPTER_NAME)]


class AdapterConfig(Section):
    """A LoRA adapter of a model (docs/models.md)."""

    name: AdapterName
    path: str = ""
    """The directory with adapter_config.json and adapter_model.safetensors. The simulated engine needs none."""


class ModelConfig(Section):
    """A model that the fabric serves (docs/models.md)."""

    name: str = "smollm2-135m-instruct"
    """The name by which clients request the model."""
    path: str = ""
    """The directory with config.json, *.safetensors, tokenizer.json and chat template. Empty: `kvloom up` looks `name`
    up, among its built-in models and in `kvloom models list`."""
    version: str = ""
    """The version that clients see. Empty: that of the registered model."""
    sha256: str = ""
    """The checksum of the model's files (`kvloom models add` prints it), checked before they are loaded. Empty: it is
    not checked."""
    aliases: list[str] = []
    """Further names by which clients may request the model."""
    succeeds: str = ""
    """The model that this one is to replace, whose name and aliases it may have as aliases: they stand for it when that
    one is served no more. `kvloom models rollout` sets it."""
    owned_by: str = "kvloom"
    """The organisation that GET /v1/models names."""
    tool_parser: str = "auto"
    """How the model writes tool calls: the name of a family (docs/tool-calls.md), "none", or "auto": what its chat
    template shows."""
    reasoning_parser: str = "auto"
    """How the model writes its reasoning, likewise."""
    adapters: list[AdapterConfig] = []
    """The LoRA adapters that its shards have from the start."""
    max_loaded_adapters: Annotated[int, Meta(ge=0, le=1024)] = 8
    """How many adapters a shard has in memory at the same time; the least recently used one goes. 0: none can be
    registered."""
    max_adapter_rank: Annotated[int, Meta(ge=1, le=512)] = 64
    """Adapters of a larger rank are refused."""
    defaults: GenerationDefaults = msgspec.field(default_factory=GenerationDefaults)
    reads_generation_config: bool = True
    """Whether what `defaults` does not say is taken from the model's generation_config.json, as vLLM does it."""
    shard: dict[str, Any] = {}
    """The settings of [shard] that differ for the shards of this model, e.g. `num_shards` or `engine`."""


class RouteTarget(Section):
    """A model among which a route chooses."""

    model: str
    """A model's name or alias, never a route's."""
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    """Its share, in relation to the other targets'."""


Language = Literal[
    "ar",
    "de",
    "el",
    "en",
    "es",
    "fr",
    "he",
    "hi",
    "it",
    "ja",
    "ko",
    "nl",
    "pl",
    "pt",
    "ru",
    "sv",
    "th",
    "tr",
    "uk",
    "zh",
]
"""The languages that rules tell apart, by their ISO 639-1 codes."""


class RouteRule(Section):
    """Which models take the requests for which all of the conditions hold. A condition that is not set always holds."""

    targets: Annotated[list[str | RouteTarget], Meta(min_length=1, max_length=8)]
    """As those of the route."""
    features: list[Literal["tools", "schema", "logprobs", "vision"]] = []
    """What the request asks for, all of it: tools, a form that the answer must have, logprobs, that images are seen."""
    tiers: list[Literal["interactive", "batch"]] = []
    """One of them is the request's."""
    min_prompt_tokens: NonNegativeInt = 0
    """The least size of the prompt. Before a model is chosen, it is estimated: a quarter of the body's bytes."""
    max_prompt_tokens: NonNegativeInt = 0
    """The largest size. 0: any."""
    min_context_tokens: NonNegativeInt = 0
    """The least context that the request needs: the estimated size of its prompt, and the most that its answer may
    have. An answer without a limit counts as nothing."""
    max_context_tokens: NonNegativeInt = 0
    """The largest context. 0: any."""
    languages: list[Language] = []
    """One of them is that of the last message of the user. One that is not clear is none of them."""


class CascadeConfig(Section):
    """When the answer of one of a route's models is discarded, so that the next model answers."""

    escalate_on: Annotated[list[Literal["schema", "logprob", "refusal"]], Meta(min_length=1)]
    """The tests that an answer must pass."""
    min_mean_logprob: Annotated[float, Meta(le=0, ge=-100)] = -1.0
    """For "logprob": the least mean log-probability of an answer's tokens."""


class RouteConfig(Section):
    """A name by which clients request one of several models (docs/model-routes.md)."""

    name: str
    """It goes before a model of the same name."""
    targets: Annotated[list[str | RouteTarget], Meta(min_length=1, max_length=8)]
    """The models, by their names or with weights."""
    rules: Annotated[list[RouteRule], Meta(max_length=64)] = []
    """The first whose conditions hold replaces `targets`."""
    fallback: Annotated[list[str], Meta(max_length=8)] = []
    """The models to try, in this order, when the chosen one cannot take a request."""
    cascade: CascadeConfig | None = None
    """The answer of every model but the last must pass these tests before the client gets it. None: answers are not
    judged."""
    on_loss: Literal["fail", "continue"] = "fail"
    """What becomes of a streamed answer whose model is lost when the client has a part of it: it fails, or the next
    model of the route continues its text."""


class ShadowConfig(Section):
    """A share of a model's answers that is also given to a candidate, without being shown to anyone
    (docs/shadow-traffic.md)."""

    model: str
    """The model whose answers are sampled."""
    candidate: str
    """The model that is compared with it."""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """The share of the model's answers."""
    mode: Literal["score", "generate"] = "score"
    """"score": the candidate computes how likely it finds the answer, by one prefill. "generate": it answers, too."""
    max_in_flight: Annotated[int, Meta(ge=1, le=256)] = 2
    """How many requests a router has under way at the candidate for this."""
    max_queued: Annotated[int, Meta(ge=1, le=4096)] = 64
    """How many ended answers a router keeps until the candidate has room. Further ones are skipped."""
    max_tokens: Annotated[int, Meta(ge=2, le=131_072)] = 4096
    """The largest prompt and answer together. Larger ones are skipped."""


class ResumeConfig(Section):
    """Streams that can be resumed after their connection was lost (docs/http-api.md, docs/grpc-api.md)."""

    grace_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """How long a response waits for its client to return before it is cancelled and dropped. 0: it does not wait."""
    by_default: bool = False
    """Whether streams are resumable if their clients do not choose (`x-kvloom-resume`, `GenerateRequest.resumable`).
    Streams that break off for good then cost up to `grace_seconds` of generation."""
    max_unattended: PositiveInt = 1024
    """Running answers that no client reads. If there are more, those that have waited longest are cancelled."""
    max_response_bytes: Annotated[int, Meta(ge=4096)] = 4 * 2**20
    """The size of the events kept of one response. The oldest are dropped first."""
    max_bytes: Annotated[int, Meta(ge=4096)] = 256 * 2**20
    """The size of the events kept of all responses of a process."""


class EdgeResumeConfig(ResumeConfig):
    """Resumable streams of an edge, which other edges can continue."""

    commit_seconds: Annotated[float, Meta(ge=0, le=10)] = 0.2
    """How long an event of a resumable stream may wait until Redis has it, so that another edge can continue exactly
    after the client's last event when this edge dies. Mostly it takes less than a millisecond. 0: events do not wait,
    and Redis gets them ten times a second; a client that has seen more than Redis then cannot resume."""
    max_journal_bytes: Annotated[int, Meta(ge=2 * 2**20)] = 32 * 2**20
    """The size of an edge's latest events in Redis, which other edges read after it has died."""
    idempotency_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 600.0
    """How long a complete answer to a request with an `Idempotency-Key` is kept for repeats of the request, a streamed
    one after its last reader. 0: repeats get the answer only while it is made."""
    max_kept_answer_bytes: Annotated[int, Meta(ge=4096)] = 64 * 2**20
    """The size of all answers together that are kept for `Idempotency-Key`s and are not streamed. The oldest are
    dropped first, and one caller may have half of it. An answer over `max_response_bytes` is not kept."""
    advertised_address: str = ""
    """host:port where the other edges reach this one. Empty: where it listens. Set it when `edge.host` is a wildcard,
    otherwise only this edge can resume its streams. For edges that share a port only the host is used, because each
    has its own port as well."""


class EdgeConfig(Section):
    """The HTTP edges."""

    host: str = "127.0.0.1"
    port: Port = 8080
    root_path: Annotated[str, Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$", max_length=256)] = ""
    """The path below which a proxy serves the edges, e.g. "/llm": requests may have it or not, and the pages and
    /openapi.json name it. Empty: there is none."""
    num_edges: Annotated[int, Meta(ge=1, le=256)] = 1
    """How many edges `kvloom up` starts. They share the port."""
    colocate: bool = False
    """Whether `kvloom up` puts a router into each edge's process, instead of starting `router.num_routers`."""
    max_body_bytes: PositiveInt = 4 * 2**20
    max_header_bytes: PositiveInt = 16 * 2**10
    max_messages: PositiveInt = 4096
    max_buffered_bytes: PositiveInt = 256 * 2**10
    """The bytes that may wait for a slow reader, per stream. Beyond that the request is cancelled."""
    stream_keep_alive_seconds: Annotated[float, Meta(ge=0)] = 10.0
    """After so long without an event a stream gets an SSE comment (of /v1/messages a `ping`), so that no proxy cuts it.
    0: never."""
    stream_head_seconds: Annotated[float, Meta(ge=0)] = 0.5
    """A stream that was not refused in this time begins, with status 200 and headers, before twice the time is over.
    From then on an error is an event. 0: it begins with its first token, or with what keeps it alive."""
    max_concurrent_requests: PositiveInt = 8192
    max_concurrent_requests_per_caller: PositiveInt = 4096
    """Running requests of one caller (docs/http-api.md). Beyond that it gets a 429, while the others are served."""
    max_connections: PositiveInt = 16_384
    """Connections open at a time. Further ones get a 503 and are closed."""
    max_connections_per_address: PositiveInt = 8192
    """Connections open at a time from one IPv4 address or one IPv6 network of 64 bits. Further ones get a 429 and are
    closed. Trusted proxies may have any number."""
    trusted_proxies: list[str] = []
    """The networks (CIDR) of reverse proxies in front of the edges. A request from one of them counts as that of the
    last address in X-Forwarded-For that is not in these networks."""
    cors_origins: list[str] = []
    """The origins of web pages that may use the API from a browser, e.g. "https://chat.example.com"; "*": all. Empty:
    only pages of the edge itself."""
    api_docs: bool = True
    """Whether the API is described at /openapi.json and /docs, also to callers without an API key."""
    strict_fields: bool = False
    """Whether requests with fields that are not known are refused (docs/http-api.md). The header x-kvloom-strict says
    it for one request."""
    allow_adapter_changes: bool = False
    """Whether POST /v1/load_lora_adapter and /v1/unload_lora_adapter are served, to all callers of the API."""
    adapters_dir: str = ""
    """The directory below which adapters are that these may load."""
    max_pending_body_bytes: Annotated[int, Meta(ge=4 * 2**20)] = 256 * 2**20
    """The size of all bodies together that are being received or parsed. Beyond that requests are rejected at once."""
    max_answer_bytes: Annotated[int, Meta(ge=4096)] = 32 * 2**20
    """The size of an answer that is not streamed. Beyond that the request is cancelled."""
    max_pending_answer_bytes: Annotated[int, Meta(ge=2**20)] = 256 * 2**20
    """The size of all answers together that are not streamed, while they are collected and sent. Beyond that the
    answer that needs more fails."""
    max_memory_bytes: Annotated[int, Meta(ge=0)] = 0
    """The resident memory of an edge's process. From 85% of it on, large requests are refused, and from 100% on all new
    ones; running answers continue. 0: a quarter of the memory of the machine or the cgroup."""
    header_timeout_seconds: PositiveFloat = 10.0
    """The time from a connection's start, or the first byte of a later request, to the end of the headers."""
    body_timeout_seconds: PositiveFloat = 60.0
    """The time from the end of the headers to the end of the body."""
    request_timeout_seconds: PositiveFloat = 600.0
    drain_timeout_seconds: PositiveFloat = 30.0
    stays_on_cpu: bool = True
    """Whether the event loop is kept on one CPU while nothing else keeps it busy
    (kvloom_common/process/cpu_affinity.py)."""
    routers: list[Address] = []
    """host:port of each router. Empty: the one of [router], and all that announce themselves in Redis."""
    reattach_seconds: Annotated[float, Meta(ge=0, le=600)] = 10.0
    """How long an answer that has lost its router may look for another one that continues it. 0: it fails at once."""
    resume: EdgeResumeConfig = msgspec.field(default_factory=EdgeResumeConfig)

    def __post_init__(self) -> None:
        if self.allow_adapter_changes and not self.adapters_dir:
            raise ValueError("allow_adapter_changes needs adapters_dir")
        for network in self.trusted_proxies:
            ipaddress.ip_network(network)  # a ValueError names the network, and msgspec adds the key
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin such as https://chat.example.com, nor *")
        if "*" in self.cors_origins and len(self.cors_origins) > 1:
            raise ValueError("cors_origins has both * and single origins")


class PlacementConfig(Section):
    """How the router chooses a shard for a request."""

    policy: str = "ect"
    """The name of a policy in router/core/placement ("ect", "round_robin", "least_requests" ...) or of a plugin's."""
    prefill_chunks: bool = True
    """Whether the default policy splits long prompts into prefill chunks, between which shorter prompts are prefilled
    (docs/routing.md). The engines must keep prefixes in their cache."""


class DecisionLogConfig(Section):
    """Which placements are kept for `kvloom explain`, and whether they are written to a file."""

    sample_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """The share of the requests that are recorded, chosen by a hash of their ids. 0: none."""
    max_remembered: PositiveInt = 4096
    """How many of the latest requests are kept in memory."""
    path: str = ""
    """JSON lines (docs/routing-decisions.md) are appended to this file, one for each recorded request that ended. Each
    router needs its own file. Empty: no file is written."""
    max_bytes: Annotated[int, Meta(ge=65_536)] = 64 * 2**20
    """The size of the file. When it is reached, the file is renamed to `path` + ".1"."""


class OverloadConfig(Section):
    """What happens when the load exceeds the capacity of the shards (docs/reliability.md)."""

    sheds_early: bool = True
    """Whether to reject requests on arrival that would wait longer than they may, judged by the rate at which the queue
    drains, and to drop queued requests that cannot be answered before their deadline. Otherwise only
    `max_queued_requests` and the clock decide."""
    outage_patience_seconds: Annotated[float, Meta(ge=0)] = 5.0
    """How long admitted requests wait for a shard when the last one is lost. New requests are rejected at once."""
    ramp_start_requests: PositiveInt = 8
    """How many requests a shard that joins (or returns) while requests are queued gets at first. It gets two more with
    every first token that it produces, so that it is not overwhelmed."""


TierName = Literal["interactive", "batch"]


class BrownoutStepConfig(Section):
    """What one step of the brownout ladder does, in addition to the steps before it."""

    max_tokens: Annotated[int, Meta(ge=0)] = 0
    """The most output tokens of an answer, which then ends with `length`. 0: no cap."""
    no_speculation: bool = False
    """Whether engines draft no tokens (`shard.torch.speculation`), which costs answers time but no quality."""
    max_choices: Annotated[int, Meta(ge=0)] = 0
    """Requests for more choices (`n`) are refused. 0: no limit."""
    smaller_model: bool = False
    """Whether requests whose route or `models` names another model are passed on to it."""
    shed: list[TierName] = []
    """The tiers whose requests are refused."""
    max_queue_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Requests that would wait longer than this for a shard are refused, as judged by the rate at which the queue
    drains. They count as missed objectives. 0: `router.max_queue_seconds` decides."""
    applies_to: Annotated[list[TierName], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: list[TierName](("interactive", "batch"))
    )
    """The tiers whose requests the step concerns; those of others are exempt from it."""

    def __post_init__(self) -> None:
        effects = ("max_tokens", "no_speculation", "max_choices", "smaller_model", "shed", "max_queue_seconds")
        if not any(getattr(self, name) for name in effects):
            raise ValueError(f"a step needs one of {', '.join(effects)}: it does nothing")
        for tier in self.shed:
            if tier not in self.applies_to:
                raise ValueError(f"shed names {tier!r}, which applies_to exempts")


def _default_ladder() -> list[BrownoutStepConfig]:
    return [
        BrownoutStepConfig(no_speculation=True, max_tokens=1024),
        BrownoutStepConfig(smaller_model=True, max_tokens=512),
        BrownoutStepConfig(max_choices=1, max_tokens=256),
        BrownoutStepConfig(shed=["batch"], max_queue_seconds=1.0),
    ]


class BrownoutConfig(Section):
    """How answers are degraded under overload before requests are refused (docs/brownout.md)."""

    enabled: bool = False
    ttft_slo_seconds: PositiveFloat = 2.0
    """The objective: an interactive request has its first token within this time."""
    target: Annotated[float, Meta(gt=0, lt=1)] = 0.95
    """The share of interactive requests that must meet it. The rest is the error budget."""
    fast_window_seconds: PositiveFloat = 10.0
    slow_window_seconds: PositiveFloat = 60.0
    """At most 36 fast windows."""
    step_up_burn_rate: PositiveFloat = 4.0
    """A model goes one step up when both windows use up the error budget this many times as fast as `target` allows."""
    step_down_burn_rate: PositiveFloat = 1.0
    """It goes one step down when the fast window has stayed below this rate for `hold_seconds`."""
    min_step_seconds: PositiveFloat = 10.0
    """How long a model is on a step, at least, before it goes further up; at least the fast window, which then shows
    what the step has done."""
    hold_seconds: PositiveFloat = 30.0
    """Doubled, up to eight times this, whenever the model has to go up again soon after it went down."""
    min_requests: PositiveInt = 10
    """With fewer interactive requests of a model in the slow window, it does not go up."""
    steps: Annotated[list[BrownoutStepConfig], Meta(min_length=1, max_length=16)] = msgspec.field(
        default_factory=_default_ladder
    )
    """The ladder, from the mildest step to the last."""

    def __post_init__(self) -> None:
        if not self.fast_window_seconds < self.slow_window_seconds <= 36 * self.fast_window_seconds:
            raise ValueError("slow_window_seconds must be above fast_window_seconds, and at most 36 times as long")
        if self.min_step_seconds < self.fast_window_seconds:
            raise ValueError("min_step_seconds must be at least fast_window_seconds")
        if self.step_down_burn_rate >= self.step_up_burn_rate:
            raise ValueError("step_down_burn_rate must be below step_up_burn_rate")
        if self.step_up_burn_rate * (1 - self.target) > 1:
            raise ValueError(
                f"step_up_burn_rate cannot be reached: with target = {self.target:g} the rate is at most "
                f"{1 / (1 - self.target):.3g}"
            )


class FairnessConfig(Section):
    """How tenants (or callers) share the shards when one of them fills them (docs/reliability.md)."""

    enabled: bool = True
    """Whether running answers of a tenant above its share wait while other tenants are served."""
    preempt_after_seconds: PositiveFloat = 0.25
    """How long a request of a tenant below its share waits before it gets the place of a running answer."""
    reserved_share: Annotated[float, Meta(ge=0, lt=1)] = 0.125
    """The part of each shard's batch and of its KV blocks, at least one of each, that tenants above their share leave
    free while tenants compete."""
    contention_seconds: PositiveFloat = 30.0
    """How long tenants, or classes, are taken to compete after one had to wait."""
    competing_prefill_seconds: Annotated[float, Meta(ge=0)] = 0.05
    """The most unfinished prefill of a shard, in seconds, to which this router adds for a tenant above its share while
    several tenants use the shard, so that another tenant's request hardly waits for it; 0: any."""
    prompt_token_weight: PositiveFloat = 1.0
    """What a prompt token that has to be computed counts as service of its tenant. The tenant with the least service is
    next in a queue (docs/scheduling.md)."""
    output_token_weight: PositiveFloat = 2.0


class PriorityClassConfig(Section):
    """A class of requests (docs/scheduling.md)."""

    name: str
    """What requests name. "interactive" and "batch" are those of requests that name none."""
    rank: Annotated[int, Meta(ge=0, le=15)]
    """The lower, the more urgent. The built-in classes have 1 (interactive), 2 (batch) and 3 (shadow traffic)."""
    weight: PositiveFloat = 1.0
    """The share among classes of one rank."""
    reserved_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """The part of each shard's batch and KV blocks that other classes leave to this one while it has work."""
    aging_seconds: PositiveFloat = 30.0
    """After how long a waiting request counts as one rank more urgent."""
    max_queue_seconds: PositiveFloat | None = None
    """How long a request may wait; by default `router.max_queue_seconds`."""

    def __post_init__(self) -> None:
        if not _CLASS_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a name of lower-case letters, digits, - and _, of at most 64")


class HealthConfig(Section):
    """When the router suspects a shard. A suspected shard gets no new requests, its running ones continue on other
    shards, and probes, which are requests for one token, find out when it is healthy again (docs/reliability.md)."""

    enabled: bool = True
    stall_seconds: PositiveFloat = 5.0
    """A shard that has work and makes no progress for this long is suspected. The expected time of prefill is added."""
    slow_factor: Annotated[float, Meta(gt=1)] = 10.0
    """A shard is suspected if its tokens are this many times slower than the median of the model's shards."""
    slow_seconds: PositiveFloat = 10.0
    """How long a shard must have been decoding before its speed is judged."""
    max_failures: PositiveInt = 5
    """A shard is suspected if its engine has failed this many requests in a row."""
    max_suspected_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """The largest share of a model's shards that may be suspected at a time."""
    probe_seconds: PositiveFloat = 1.0
    """The time before the first probe of a suspected shard. Each missed probe doubles it."""
    max_probe_seconds: PositiveFloat = 30.0
    num_probes: PositiveInt = 3
    """How many probes in a row must be answered in time before the shard is healthy again."""


class ResultCacheConfig(Section):
    """Answers to deterministic requests, kept in the router for the tenant that has got them (docs/result-cache.md)."""

    enabled: bool = False
    ttl_seconds: PositiveFloat = 3600.0
    max_bytes: Annotated[int, Meta(ge=2**16)] = 64 * 2**20
    """What one router keeps, in memory."""
    max_entries: PositiveInt = 65_536
    max_answer_tokens: Annotated[int, Meta(ge=1, le=32_768)] = 1024
    """Longer answers (of all choices together) are not kept. A cached answer is sent at once, and a longer one could
    exceed `edge.max_buffered_bytes`."""
    shared: bool = False
    """Whether routers also use one another's answers, through Redis (encrypted). A request that a router cannot answer
    itself then waits for Redis, at most `shared_timeout_seconds`."""
    shared_timeout_seconds: Annotated[float, Meta(gt=0, le=1)] = 0.01


class ReceiptsConfig(Section):
    """Signed receipts, with which answers can be computed again (docs/receipts.md)."""

    enabled: bool = False
    """Whether requests may ask for one."""
    key_file: str = ""
    """The private key; made if it is missing. "": receipts.key in `data_dir`."""


class DisaggregationConfig(Section):
    """Prompts that one shard computes for another (docs/disaggregation.md), where shards have roles."""

    min_prompt_tokens: PositiveInt = 2048
    """The shard of the answer must have at least so many tokens of the prompt to compute."""
    leg_timeout_seconds: PositiveFloat = 30.0
    """A prompt that another shard has not computed within this time is computed elsewhere."""


class RouterConfig(Section):
    """The routers."""

    host: str = "127.0.0.1"
    port: Port = 8081
    num_routers: Annotated[int, Meta(ge=1, le=256)] = 1
    """How many routers `kvloom up` starts. They share the port, and each has its own port as well."""
    max_queued_requests: PositiveInt = 1024
    """How many requests may be queued for a shard. Beyond that a request is rejected at once."""
    max_queue_seconds: PositiveFloat = 60.0
    request_timeout_seconds: PositiveFloat = 600.0
    max_attempts: PositiveInt = 3
    max_prompt_tokens: PositiveInt = 262_144
    max_concurrent_requests_per_caller: PositiveInt = 4096
    """RPCs that one caller may have open. Beyond that it gets RESOURCE_EXHAUSTED, while the others are served."""
    max_connections: PositiveInt = 16_384
    """gRPC connections open at a time. Further ones are closed."""
    max_connections_per_address: PositiveInt = 8192
    """gRPC connections of one IPv4 address or one IPv6 network of 64 bits. RPCs on further ones get RESOURCE_EXHAUSTED,
    and the connections are closed. `edge.trusted_proxies` may have any number."""
    max_message_bytes: Annotated[int, Meta(ge=2**20, le=64 * 2**20)] = 16 * 2**20
    """The size of one gRPC message of a client."""
    max_pending_request_bytes: Annotated[int, Meta(ge=2**20)] = 256 * 2**20
    """The size of all requests of clients over gRPC together, from their arrival to their end. Beyond that requests are
    rejected at once."""
    max_memory_bytes: Annotated[int, Meta(ge=0)] = 0
    """As for the edge."""
    max_streams_per_connection: PositiveInt = 4096
    """RPCs open at a time on one HTTP/2 connection. Further ones wait at the client."""
    reflection: bool = True
    """Whether gRPC reflection describes the services to anyone who can connect."""
    drain_timeout_seconds: PositiveFloat = 30.0
    stays_on_cpu: bool = True
    """As for the edge."""
    placement: PlacementConfig = msgspec.field(default_factory=PlacementConfig)
    disaggregation: DisaggregationConfig = msgspec.field(default_factory=DisaggregationConfig)
    health: HealthConfig = msgspec.field(default_factory=HealthConfig)
    decision_log: DecisionLogConfig = msgspec.field(default_factory=DecisionLogConfig)
    overload: OverloadConfig = msgspec.field(default_factory=OverloadConfig)
    brownout: BrownoutConfig = msgspec.field(default_factory=BrownoutConfig)
    fairness: FairnessConfig = msgspec.field(default_factory=FairnessConfig)
    resume: ResumeConfig = msgspec.field(default_factory=ResumeConfig)
    result_cache: ResultCacheConfig = msgspec.field(default_factory=ResultCacheConfig)
    receipts: ReceiptsConfig = msgspec.field(default_factory=ReceiptsConfig)
    classes: Annotated[list[PriorityClassConfig], Meta(max_length=16)] = []
    """Classes of requests beside the built-in ones, or in their place."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.classes]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"classes: {twice!r} is declared twice")
        if sum(one.reserved_share for one in self.classes) >= 1:
            raise ValueError("classes: all reserved_share together must be less than 1")


class SimConfig(Section):
    """The timing of the simulated engine."""

    step_ms: Annotated[float, Meta(ge=0)] = 20.0
    prefill_tokens_per_second: PositiveFloat = 20_000.0
    decode_every: PositiveInt = 1
    """A sequence gets a new token only in every n-th step, counted from its first token. This simulates many slow
    sequences that are not in lockstep."""
    stamp_tokens: bool = False
    """Whether tokens include the time at which they were made, for `kvloom bench data-plane`. Answers then depend on
    the clock."""
    opening: Annotated[str, Meta(max_length=1024)] = ""
    """Text with which every answer begins, for `kvloom bench data-plane --compare tool-calls`."""
    adapter_load_ms: Annotated[float, Meta(ge=0)] = 100.0
    """How long it takes to load an adapter."""
    answer_seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """Models with different ones answer the same prompt differently, so that a test can tell which one has answered."""
    shards_per_process: PositiveInt = 1
    """How many shards `kvloom up` puts into one process, for fleets of hundreds on one machine."""


class SpeculationConfig(Section):
    """Speculative decoding: drafts are looked up in a sequence's own tokens, and verified in the step that decodes it.
    The answer is the same, and arrives sooner where it repeats earlier text."""

    max_draft_tokens: Annotated[int, Meta(ge=0, le=16)] = 0
    """The maximum number of tokens drafted for a sequence in a step. 0: no speculation."""
    max_ngram: Annotated[int, Meta(ge=1, le=8)] = 3
    """The longest run of last tokens that is searched for."""
    max_predicted_tokens: Annotated[int, Meta(ge=0, le=16)] = 8
    """The number of tokens of a request's `prediction` that are drafted at first; up to 31 while all are right. 0:
    predictions are ignored."""


class TorchConfig(Section):
    """The embedded engine."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: an NVIDIA GPU, with torch's CUDA build (docs/performance-gpu.md). Without one a shard does not start."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """The type of the numbers in memory. auto: bfloat16, but float32 where neither compiled kernels run nor the CPU
    multiplies bfloat16."""
    weights: Literal["auto", "dtype", "int8"] = "auto"
    """The type of the linear layers' weights. int8: with a scale per output channel; docs/engines.md shows the gain in
    speed and the loss of quality. auto: as `dtype` says, but int8 where only that fits into memory."""
    kernels: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "generic", "torch"] = "auto"
    """What computes on a CPU: kernels compiled for an instruction set, or torch's operators. auto: the fastest,
    measured once per machine. avx512, avx2 and generic compute the same bits, so one of them suits shards on different
    kinds of CPU."""
    num_threads: Annotated[int, Meta(ge=0)] = 0
    """0: all cores while no other engine of this user computes, and a fair share of them while some do. torch's
    operators: the machine's cores divided by `num_shards`."""
    deterministic: bool = True
    """Whether results are independent of the batch, bit for bit (docs/engines.md has the cost). Otherwise an answer
    that fails over continues from the tokens delivered, but not always with the same tokens as without the failure."""
    speculation: SpeculationConfig = msgspec.field(default_factory=SpeculationConfig)


class TensorRtKvCacheConfig(Section):
    """TensorRT-LLM's KV cache."""

    free_gpu_memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """The share of the memory that is free once the weights are loaded. If `shard.num_blocks` is set too, the smaller
    of the two limits applies."""
    dtype: str = "auto"
    """auto, fp8, ..."""
    block_reuse: bool = True
    partial_reuse: bool = True
    retention_by_class: bool = False
    """Whether blocks of requests whose class can wait are evicted before those of interactive ones, and blocks of more
    urgent ones after them."""
    host_cache_bytes: Annotated[int, Meta(ge=0)] = 0
    """The size of a second tier in host memory. 0: there is none."""
    secondary_offload_min_priority: Annotated[int, Meta(ge=0, le=100)] = 0
    """Blocks of a lower priority are not kept in the second tier. 0: the library's default."""
    disk_cache_bytes: Annotated[int, Meta(ge=0)] = 0
    """The size of a third tier on disk, in versions newer than 1.2.1. 0: there is none."""
    event_buffer_max_size: PositiveInt = 65_536
    """How many KV events may wait for the shard. Beyond that they are lost, and the shard resynchronises."""


class TensorRtSpeculationConfig(Section):
    """TensorRT-LLM's speculative decoding."""

    method: Literal["off", "ngram", "eagle3", "mtp", "draft_target"] = "off"
    max_draft_len: PositiveInt = 4
    max_matching_ngram_size: PositiveInt = 4
    """For ngram only. The pool of n-grams is never shared between requests."""
    draft_model: str = ""
    """The directory or name of the draft model, for eagle3 and draft_target."""


class TensorRtLoraConfig(Section):
    """TensorRT-LLM's LoRA adapters."""

    enabled: bool = False
    max_rank: PositiveInt = 64
    max_loras: PositiveInt = 4
    max_cpu_loras: PositiveInt = 32
    adapters: dict[str, str] = {}
    """The adapters' directories, by adapter name."""
    target_modules: list[str] = []
    """The modules that adapters may change, by TensorRT-LLM's names. Empty: those that the first of `adapters` has."""


class TensorRtCacheTransceiverConfig(Section):
    """The transfer of KV between a prefill engine and a decode engine."""

    backend: Literal["off", "DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"] = "off"
    """MOONCAKE only in versions newer than 1.2.1."""
    max_tokens_in_buffer: Annotated[int, Meta(ge=0)] = 0
    """0: the library's default."""
    timeout_ms: PositiveInt = 60_000
    """Without a timeout, a peer that cannot be reached would block the engine."""


class TensorRtKvConnectorConfig(Section):
    """TensorRT-LLM's connector to a KV store outside of the engine. By default there is none."""

    preset: str = ""
    """A name that the library knows, such as lmcache, in versions newer than 1.2.1."""
    module: str = ""
    """The Python module of a connector, instead of a preset."""
    scheduler_class: str = ""
    worker_class: str = ""

    def __post_init__(self) -> None:
        named = [bool(self.module), bool(self.scheduler_class), bool(self.worker_class)]
        if any(named) and (self.preset or not all(named)):
            raise ValueError("kv_connector takes preset, or module, scheduler_class and worker_class together")


class TensorRtLlmConfig(Section):
    """The settings of TensorRT-LLM (docs/tensorrt-llm.md). Block size, number of blocks, batch size and context window
    are those of `shard`."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    moe_expert_parallel_size: Annotated[int, Meta(ge=0)] = 0
    """Over how many GPUs the experts of a mixture are divided. 0: the library's default."""
    moe_tensor_parallel_size: Annotated[int, Meta(ge=0)] = 0
    """Over how many GPUs each expert is divided. 0: the library's default."""
    gpus_per_node: Annotated[int, Meta(ge=0)] = 0
    """GPUs of one machine, for an engine on several (`shard.launcher`). 0: those that the library finds."""
    attention_dp: bool = False
    attention_dp_follows_prefix: bool = False
    """Whether a request is to run on the rank that holds most of its prompt's blocks, unless that rank is full."""
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"
    """How TensorRT-LLM orders waiting requests: as they have come, or by the rank of their class. The latter needs a
    version newer than 1.2.1."""
    dtype: str = "auto"
    trust_remote_code: bool = False
    max_num_tokens: PositiveInt = 8192
    """The maximum number of tokens of one step. Without chunked prefill, a prompt cannot be longer either."""
    chunked_prefill: bool = True
    overlap_scheduler: bool = True
    cuda_graphs: bool = True
    stream_interval: PositiveInt = 1
    guided_decoding_backend: Literal["off", "xgrammar", "llguidance"] = "off"
    sampler_type: Literal["auto", "TorchSampler", "TRTLLMSampler"] = "auto"
    penalties: bool = False
    """Whether the chosen sampler applies penalties (docs/tensorrt-llm.md). Otherwise requests with penalties are
    rejected, naming the parameter."""
    extra_llm_options: dict[str, Any] = {}
    """Further arguments of `LLM`, passed unchanged."""
    start_timeout_seconds: PositiveFloat = 3600.0
    probe_interval_seconds: PositiveFloat = 30.0
    """How often an idle engine generates one token, to show that it still can."""
    probe_timeout_seconds: PositiveFloat = 30.0
    stall_timeout_seconds: PositiveFloat = 120.0
    """An engine that has work and makes no progress for this long counts as dead."""
    max_failed_requests: PositiveInt = 8
    """After so many requests in a row that TensorRT-LLM has failed, it must generate one token to count as alive."""
    loop_timeout_seconds: Annotated[float, Meta(ge=0)] = 60.0
    """When TensorRT-LLM blocks the shard's event loop for this long, the process ends. 0: it never does."""
    cancel_timeout_seconds: PositiveFloat = 10.0
    """A cancelled sequence that TensorRT-LLM does not end within this time is cut off."""
    unread_timeout_seconds: PositiveFloat = 30.0
    """When the engine's output is not read for this long, its sequences are aborted."""
    kv_cache: TensorRtKvCacheConfig = msgspec.field(default_factory=TensorRtKvCacheConfig)
    speculation: TensorRtSpeculationConfig = msgspec.field(default_factory=TensorRtSpeculationConfig)
    lora: TensorRtLoraConfig = msgspec.field(default_factory=TensorRtLoraConfig)
    kv_connector: TensorRtKvConnectorConfig = msgspec.field(default_factory=TensorRtKvConnectorConfig)
    cache_transceiver: TensorRtCacheTransceiverConfig = msgspec.field(default_factory=TensorRtCacheTransceiverConfig)


SMALL_MACHINE_CORES: Final = 2


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ShardConfig(Section):
    """The shards, and the engine that each runs."""

    engine: str = "torch"
    """torch, sim, tensorrt_llm, or the name of a plugin's engine (docs/plugins.md)."""
    num_shards: Annotated[int, Meta(ge=0)] = 0
    """How many shards `kvloom up` starts. 0: two, or one of the torch engine on a machine with at most two cores, which
    two would share, each with the weights in memory."""
    host: str = "127.0.0.1"
    reflection: bool = True
    """As for the router."""
    block_size: PositiveInt = 16
    num_blocks: Annotated[int, Meta(ge=0)] = 0
    """The number of KV blocks. 0: the engine's default for the model."""
    max_batch: PositiveInt = 64
    max_model_len: Annotated[int, Meta(ge=0)] = 0
    """0: the model's own context window."""
    max_prefill_tokens_per_step: PositiveInt = 512
    """Prompts are prefilled in chunks of this many tokens, so that running sequences are not stalled. The torch engine
    uses smaller chunks where one of this size would take more than a second."""
    max_waiting: PositiveInt = 1024
    queue_order: Literal["fcfs", "shortest_prefill"] = "fcfs"
    """Which waiting sequence is admitted next: the first that arrived, or the one with the least left to prefill. Aging
    ensures that no sequence is overtaken forever (docs/engines.md)."""
    drain_timeout_seconds: PositiveFloat = 30.0
    role: Literal["", "prefill", "decode", "both"] = ""
    """The part that these shards take where some shards compute long prompts and others the answers
    (docs/disaggregation.md). Empty: they compute whole requests."""
    num_prefill_shards: Annotated[int, Meta(ge=0)] = 0
    """How many of `num_shards` get the role prefill from `kvloom up`. The others then get the role decode."""
    launcher: list[str] = []
    """The command with which `kvloom up` starts each shard, before the shard's own command line, for engines of several
    processes: e.g. ["mpirun", "-n", "2", "trtllm-llmapi-launch"]. Empty: there is none."""
    spot_notice_file: str = ""
    """A file that something else writes when the machine is about to be taken away, such as an agent that asks the
    cloud. Its text is the number of seconds that are left; anything else means `spot_notice_seconds`. The shard's
    answers end or move to other shards by then, and its process ends for good (docs/notices.md)."""
    spot_notice_seconds: PositiveFloat = 30.0
    """How long the machine stays after a notice that does not say it, such as SIGUSR2."""
    sim: SimConfig = msgspec.field(default_factory=SimConfig)
    torch: TorchConfig = msgspec.field(default_factory=TorchConfig)
    tensorrt_llm: TensorRtLlmConfig = msgspec.field(default_factory=TensorRtLlmConfig)
    plugin: dict[str, Any] = {}
    """The settings of a plugin's engine, which only that engine knows and checks."""

    def __post_init__(self) -> None:
        if self.num_prefill_shards and self.num_prefill_shards >= self.num_started:
            raise ValueError(f"num_prefill_shards must leave one of {self.num_started} shards for answers")

    @property
    def num_started(self) -> int:
        """`num_shards`, with what 0 stands for on this machine."""
        return self.num_shards or (1 if self.engine == "torch" and num_cores() <= SMALL_MACHINE_CORES else 2)


class SafetyConfig(Section):
    """The safety service, and what happens when it is missing."""

    host: str = "127.0.0.1"
    port: Port = 0
    discover: bool = False
    """Whether routers also use the safety services that announce themselves in Redis: one after the other, until one
    can be reached, and the one at `host` and `port` first. `kvloom up` sets it for a fleet."""
    reflection: bool = True
    """As for the router."""
    policy_file: str = ""
    """A TOML file with the rules, reloaded when it changes. Empty: the built-in policy."""
    answer_mode: Literal["gate", "async", "off"] = "gate"
    """gate: text is held until it is screened. async: text is sent at once, and the request is halted on a hit."""
    on_unavailable: Literal["refuse", "allow"] = "refuse"
    """What happens to requests while the safety service cannot be reached."""
    patience_seconds: Annotated[float, Meta(ge=0)] = 5.0
    """How long requests wait for a lost safety service before `on_unavailable` applies. Meanwhile no unscreened text is
    shown. 0: they do not wait."""
    drain_timeout_seconds: PositiveFloat = 10.0
    """How long a service that has a successor continues to serve the streams that its routers have opened."""


class FabricConfig(Section):
    """What the processes of one fabric have in common, besides the model."""

    secret_file: str = ""
    """The file with the fabric's secret (docs/security.md), by which its processes recognise one another. Empty:
    `kvloom up` makes one in the data directory; a service that is started by itself takes the secret from the
    environment variable KVLOOM_FABRIC_SECRET, and works without one if that is not set."""
    roles: list[Literal["edge", "router", "shard", "safety", "control"]] = []
    """What `kvloom up` starts on this machine. Empty: all."""
    host: str = ""
    """Where processes listen for the other processes of their fabric, which all need its secret. Empty: `router.host`,
    `shard.host`, `safety.host` and `edge.host`."""
    advertised_host: str = ""
    """The host by which other machines reach the processes of this one. Empty: `host`, or the machine's name where
    `host` is a wildcard."""
    name_prefix: Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9-]{0,31})?$")] = ""
    """What the names of the processes that `kvloom up` starts begin with. Names are unique in a fleet, so machines that
    share a Redis need different prefixes."""


class CallersConfig(Section):
    """Who may call, and who counts as one caller. Callers share neither cached prompts nor names of requests."""

    api_keys_file: str = ""
    """The file with the hashes of API keys (`kvloom keys`), reloaded when it changes. Empty: no key is needed."""
    provider: str = ""
    """The name of a plugin that says who a caller is (docs/plugins.md), instead of API keys. Empty: there is none."""
    plugin: dict[str, Any] = {}
    """The settings of that plugin, which only it knows and checks."""
    provider_timeout_seconds: Annotated[float, Meta(gt=0, le=60)] = 5.0
    """How long the provider may take for an answer. Then the caller gets a 503 `auth_unavailable`."""
    provider_cache_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """How long the provider's answers are kept: a caller who loses access has it for at most that long. Refusals are
    kept for 5 seconds at most."""
    kv_shares: dict[str, Annotated[int, Meta(ge=1)]] = {}
    """The part of every shard's KV blocks, in percent, that is guaranteed to a caller (docs/kv-shares.md), by the
    caller's name: "key-NAME" for an API key, "id-ID" for an id of the provider. At most 90 together. With tenants,
    limits of accounts say this instead."""
    allow_insecure: bool = False
    """Whether edges and routers may listen on other addresses than loopback without TLS or without API keys or
    a provider."""
    anonymous: Literal["address", "shared"] = "address"
    """Requests without an Authorization header. address: each IP address is a caller. shared: they are all one
    caller's, so that they share cached prompts and can find out which prompts others have sent."""

    def __post_init__(self) -> None:
        if (total := sum(self.kv_shares.values())) > MAX_KV_SHARES_PERCENT:
            raise ValueError(f"kv_shares guarantees {total}% together, and at most {MAX_KV_SHARES_PERCENT}% can be")


TenantId = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}/[a-z0-9-]{1,64}$")]
"""ORGANISATION/PROJECT"""
TokenAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"
]
"""Those whose keys can be published."""
RoleName = Literal["reader", "member", "operator", "admin"]


class IssuerConfig(Section):
    """An OIDC provider whose tokens (JWTs) are accepted like keys (docs/tenancy.md)."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
    """What its subjects' ids begin with: `oidc:NAME:SUBJECT`."""
    issuer: Annotated[str, Meta(min_length=1, max_length=512)]
    """The `iss` of its tokens, exactly."""
    audiences: Annotated[list[str], Meta(min_length=1, max_length=16)]
    """One of them must be in a token's `aud`."""
    jwks_url: str = ""
    """Where it publishes its keys: an https URL, or an http one of this machine."""
    jwks_file: str = ""
    """A file with its keys, instead of `jwks_url`."""
    algorithms: Annotated[list[TokenAlgorithm], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: list[TokenAlgorithm](("RS256", "ES256"))
    )
    """Those that its tokens may be signed with."""
    tenant_claim: str = "tenant"
    """The claim that says to which tenant a token belongs: a text, or a list of texts (groups)."""
    tenants: dict[str, TenantId] = {}
    """The tenants by the values of that claim; the first one here that a token has counts. Empty: the value itself is a
    tenant, so the issuer may name any of them."""
    role_claim: str = "roles"
    """The claim that says which role the token has: a text, or a list of texts."""
    roles: dict[str, RoleName] = {}
    """The roles by the values of that claim; the highest that a token has counts."""
    default_role: RoleName | Literal[""] = "member"
    """The role of tokens that have none of `roles`. "": they are refused."""
    leeway_seconds: Annotated[float, Meta(ge=0, le=300)] = 30.0
    """How much the clocks may differ."""
    refresh_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    """How often the keys are read again."""
    min_refetch_seconds: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    """A token with a key that is not known makes them be read again at once, but not more often than this."""

    def __post_init__(self) -> None:
        if bool(self.jwks_url) == bool(self.jwks_file):
            raise ValueError("one of jwks_url and jwks_file is needed")


class CertificateConfig(Section):
    """Clients' certificates (`tls.client_ca_file`) that are accepted like keys. A client with a key needs none of
    these."""

    tenant: TenantId
    uri: str = ""
    """A URI of the certificate, such as a SPIFFE id; with "*" at its end, all that begin so."""
    common_name: str = ""
    """The common name of the certificate's subject, instead of `uri`."""
    role: RoleName = "member"

    def __post_init__(self) -> None:
        if bool(self.uri.strip("*")) == bool(self.common_name):
            raise ValueError("one of uri and common_name is needed")


class ControlConfig(Section):
    """The control service: tenants with keys, limits, budgets and metering (docs/tenancy.md)."""

    enabled: bool = False
    """Whether the fabric has tenants. Then only holders of their keys are served."""
    host: str = "127.0.0.1"
    port: Port = 0
    """Where the service listens for the processes of its fabric. 0: the system picks the port."""
    database_url: str = ""
    """"postgresql://USER@HOST/NAME", or "sqlite:///PATH". Empty: a SQLite file in the data directory."""
    max_stale_seconds: PositiveFloat = 86_400.0
    """How long edges and routers serve with the table of tenants that they have while the service cannot be reached."""
    usage_record_days: Annotated[int, Meta(ge=0, le=36_500)] = 400
    """How long the record of each request is kept; sums by day, model and key stay. 0: for ever."""
    budget_alert_percents: Annotated[list[Annotated[int, Meta(ge=1, le=1000)]], Meta(max_length=16)] = msgspec.field(
        default_factory=lambda: [80, 100]
    )
    """Notices are sent when so much of a budget is spent."""
    webhook_urls: Annotated[list[str], Meta(max_length=16)] = []
    """Where notices about budgets are sent."""
    webhook_secret_file: str = ""
    """The file with the secret with which notices are signed ("whsec_...", see standardwebhooks.com)."""
    max_keys: PositiveInt = 10_000
    max_projects: PositiveInt = 1_000
    max_users: PositiveInt = 10_000
    """How many keys, projects and users an organisation may have, unless the operator gives it quotas of its own. Keys
    that were revoked or have long expired do not count."""
    max_entry_bytes: PositiveInt = 16 * 2**20
    """How large an organisation's keys and projects may be together, which each edge and router keeps in memory: the
    texts that were given, and 256 bytes each."""
    witness: bool = False
    """Whether edges write down what they have delivered, and routers what they have sent to clients outside the fabric,
    for `kvloom usage reconcile`."""
    operator_organisation: str = ""
    """The organisation whose keys with the scope admin administer the whole fabric over HTTP, as the commands on its
    machines do. Empty: such keys administer their own organisations only."""
    issuers: Annotated[list[IssuerConfig], Meta(max_length=16)] = []
    """OIDC providers whose tokens are accepted like keys."""
    certificates: Annotated[list[CertificateConfig], Meta(max_length=1024)] = []
    """Clients' certificates that are accepted like keys; the first that fits counts."""

    def __post_init__(self) -> None:
        for url in self.webhook_urls:
            if not _WEBHOOK.fullmatch(url):
                raise ValueError(f"{url!r} is not a URL such as https://example.com/budgets")
        if self.webhook_urls and not self.webhook_secret_file:
            raise ValueError("webhook_urls needs webhook_secret_file")


class TlsConfig(Section):
    """TLS for clients, on the HTTP and the gRPC port. The files are in PEM and are reloaded when they change."""

    certificate_file: str = ""
    """The server's certificate, and the intermediate ones. Empty: no TLS."""
    key_file: str = ""
    client_ca_file: str = ""
    """The authorities of clients' certificates. Empty: clients need none."""
    client_crl_file: str = ""
    """Lists of the certificates that these authorities have revoked. Empty: none are."""

    def __post_init__(self) -> None:
        if bool(self.certificate_file) != bool(self.key_file):
            raise ValueError("certificate_file and key_file are needed together")
        if self.client_ca_file and not self.certificate_file:
            raise ValueError("client_ca_file needs certificate_file")
        if self.client_crl_file and not self.client_ca_file:
            raise ValueError("client_crl_file needs client_ca_file")


class RedisConfig(Section):
    """The Redis server with the registry and the edges' journals."""

    url: str = ""
    """redis://host:port/db. Empty: `kvloom up` starts an embedded server."""
    key_prefix: str = "kvloom"


class LogConfig(Section):
    """The logs of all processes."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"
    access: Literal["on", "off"] = "on"
    """Whether a line is logged when a request ends, also for one that was refused: by the edge for every HTTP request,
    by the router for every RPC, by a shard for every sequence."""
    access_sample_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """The share of requests that are logged. It is drawn by the caller's request id, so that all processes log the same
    requests."""


class MetricsConfig(Section):
    """Where routers, shards and the safety service serve /metrics (docs/metrics.md). Edges serve it on `edge.host`."""

    host: str = "127.0.0.1"
    """Other addresses than loopback need TLS and API keys, like those for clients."""
    port: Port = 0
    """The first of consecutive ports that `kvloom up` gives to its processes: to the safety service, the routers, the
    edges and the shards, in this order. 0: each process picks a free port."""


class KvloomConfig(Section):
    """The whole configuration."""

    data_dir: str = ""
    """The directory in which `kvloom up` keeps logs, sockets and converted models. Empty: ~/.kvloom."""
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    """The model, or the first one of several."""
    models: list[ModelConfig] = []
    """Further models. Where nothing is said of `model`, these are all."""
    routes: Annotated[list[RouteConfig], Meta(max_length=256)] = []
    """Names that stand for one of several models, chosen by rules and shares."""
    shadows: Annotated[list[ShadowConfig], Meta(max_length=64)] = []
    """Candidates that are compared with models on a share of their answers."""
    edge: EdgeConfig = msgspec.field(default_factory=EdgeConfig)
    router: RouterConfig = msgspec.field(default_factory=RouterConfig)
    shard: ShardConfig = msgspec.field(default_factory=ShardConfig)
    safety: SafetyConfig = msgspec.field(default_factory=SafetyConfig)
    fabric: FabricConfig = msgspec.field(default_factory=FabricConfig)
    callers: CallersConfig = msgspec.field(default_factory=CallersConfig)
    control: ControlConfig = msgspec.field(default_factory=ControlConfig)
    tls: TlsConfig = msgspec.field(default_factory=TlsConfig)
    redis: RedisConfig = msgspec.field(default_factory=RedisConfig)
    metrics: MetricsConfig = msgspec.field(default_factory=MetricsConfig)
    log: LogConfig = msgspec.field(default_factory=LogConfig)


def load_config(path: Path | None) -> KvloomConfig:
    """Read a .toml or .json file. None gives the defaults. Raises ConfigError."""
    if path is None:
        return KvloomConfig()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(raw, type=KvloomConfig)
        return msgspec.toml.decode(raw, type=KvloomConfig)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"The configuration file {path} is not valid: {error}{meant_key(str(error), KvloomConfig)}"
        ) from error


def dump_config(config: KvloomConfig, path: Path) -> None:
    """Write the whole tree as JSON for the processes that `kvloom up` starts. Only this user can read it, because the
    URL of Redis may have a password."""
    write_private_file(path, msgspec.json.format(msgspec.json.encode(config), indent=2))
