"""The configuration of the shards, and of the engines that kvloom brings."""

from __future__ import annotations

import os
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from kvloom_common.config.fabric import MOVED_TO_FABRIC
from kvloom_common.config.section import AT_START, FilePath, Flag, Port, PositiveFloat, PositiveInt, Section, always
from kvloom_common.config.tensorrt_llm import TensorRtLlmConfig


class SimConfig(Section):
    """The timing of the simulated engine."""

    step_ms: Annotated[float, Meta(ge=0), Flag("sim-step-ms", "The duration of a step of the sim engine.")] = 20.0
    prefill_tokens_per_second: Annotated[
        PositiveFloat, Flag("sim-prefill-tokens-per-second", "The prefill speed of the sim engine.")
    ] = 20_000.0
    decode_every: PositiveInt = 1
    """A sequence gets a new token only in every n-th step, counted from its first token. This simulates many slow
    sequences that are not in lockstep."""
    stamp_tokens: bool = False
    """True puts into tokens the time at which they were made, for `kvloom-lab bench data-plane`. Answers then depend on
    the clock."""
    opening: Annotated[str, Meta(max_length=1024)] = ""
    """Text with which every answer begins, for `kvloom-lab bench data-plane --compare tool-calls`."""
    adapter_load_ms: Annotated[float, Meta(ge=0)] = 100.0
    """How long it takes to load an adapter."""
    sees_images: bool = False
    """True gives the engine the capability "vision": its answers then depend on the images of a prompt, as they do on
    its words."""
    answer_seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """Models with different ones answer the same prompt differently, so that a test can tell which one has answered."""
    shards_per_process: Annotated[PositiveInt, AT_START] = 1
    """How many shards `kvloom up` puts into one process, for fleets of hundreds on one machine."""


class SpeculationConfig(Section):
    """Speculative decoding: drafts are looked up in a sequence's own tokens, and verified in the step that decodes it.
    The answer is the same, and arrives sooner where it repeats earlier text."""

    moved = always(max_ngram="3", max_predicted_tokens="8")
    max_draft_tokens: Annotated[int, Meta(ge=0, le=16)] = 0
    """The maximum number of tokens drafted for a sequence in a step. 0: no speculation."""


class TorchConfig(Section):
    """The embedded engine."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: an NVIDIA GPU, with torch's CUDA build (docs/how-to/gpu.md). Without one a shard does not start."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """The type of the numbers in memory. auto: bfloat16, but float32 where neither compiled kernels run nor the CPU
    multiplies bfloat16."""
    weights: Literal["auto", "dtype", "int8", "packed", "int4"] = "auto"
    """The type of the linear layers' weights. packed: the 4 to 8 bits of a GGUF file, as they are. int8: with a scale
    per output channel; int4: with a scale and a minimum for every 32 numbers; docs/concepts/engines.md shows the gain
    in speed and the loss of quality. auto: packed, or else as `dtype` says or int8, whichever is the fastest by a
    measurement on this machine; int8 where only that fits into memory. Encoders have dtype, or int8 with a scale for
    every 32 numbers."""
    kernels: Literal["auto", "amx", "avx512_bf16", "avx512", "avx2", "generic", "torch"] = "auto"
    """The kernels that compute on a CPU: compiled for an instruction set, or torch's operators. auto: the fastest,
    measured once per machine. avx512, avx2 and generic compute the same bits, so one of them suits shards on different
    kinds of CPU."""
    num_threads: Annotated[int, Meta(ge=0)] = 0
    """0: all cores while no other engine of this user computes, and a fair share of them while some do. torch's
    operators: the machine's cores divided by `num_shards`."""
    deterministic: Annotated[
        bool,
        Flag(
            "no-deterministic",
            "Prefill faster, but let the last bits of the results of the torch engine depend on the batch.",
        ),
    ] = True
    """True makes results independent of the batch, bit for bit (docs/concepts/engines.md has the cost). Otherwise an
    answer that fails over continues from the tokens delivered, but not always with the same tokens as without the
    failure."""
    speculation: SpeculationConfig = msgspec.field(default_factory=SpeculationConfig)


SMALL_MACHINE_CORES: Final = 2


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ShardConfig(Section):
    """The shards, and the engine that each runs."""

    moved = {name: MOVED_TO_FABRIC[name] for name in ("reflection", "drain_timeout_seconds")}
    engine: Annotated[
        str,
        AT_START,
        Flag("engine", "The engine that computes the tokens. NAME: that of a plugin.", metavar="torch|sim|NAME"),
    ] = "torch"
    """torch, sim, tensorrt_llm, or the name of a plugin's engine (docs/how-to/plugins.md)."""
    num_shards: Annotated[int, Meta(ge=0), AT_START] = 0
    """How many shards `kvloom up` starts. 0: two, or one of the torch engine on a machine with at most two cores, which
    two would share, each with the weights in memory."""
    host: Annotated[str, AT_START] = "127.0.0.1"
    port: Annotated[Port, AT_START, Flag("shard-port", "The port of the first shard.", default="free ones")] = 0
    """The port at which the first shard that `kvloom up` starts listens for its fabric; the others have those after it.
    0: free ones. Shards that routers find by `router.shards` need it."""
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
    """The waiting sequence that is admitted next: the first that arrived, or the one with the least left to prefill.
    Aging ensures that no sequence is overtaken forever (docs/concepts/engines.md)."""
    role: Literal["", "prefill", "decode", "both"] = ""
    """The part that these shards take where some shards compute long prompts and others the answers
    (docs/how-to/disaggregation.md). Empty: they compute whole requests."""
    num_prefill_shards: Annotated[int, Meta(ge=0)] = 0
    """How many of `num_shards` get the role prefill from `kvloom up`. The others then get the role decode."""
    launcher: list[str] = []
    """The command with which `kvloom up` starts each shard, before the shard's own command line, for engines of several
    processes: e.g. ["mpirun", "-n", "2", "trtllm-llmapi-launch"]. Empty: there is none."""
    spot_notice_file: FilePath = ""
    """A file that something else writes when the machine is about to be taken away, such as an agent that asks the
    cloud. Its text is the number of seconds that are left; anything else means `spot_notice_seconds`. The shard's
    answers end or move to other shards by then, and its process ends for good (docs/operate/notices.md)."""
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
