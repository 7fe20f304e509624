"""The fabric that a bench starts: its options, its configuration, and what the bench asks it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import aiohttp
import click
import msgspec
from click.core import ParameterSource

from kvloom.v1.router_service_pb2 import ExplainResponse
from kvloom_common.access.api_keys import ApiKey, digest_of, draw_key, write_api_keys
from kvloom_common.config import KvloomConfig, ModelConfig
from kvloom_common.metrics.exposition import samples_in
from lab.bench.disturbed import explain
from lab.bench.experiment import DATA_DIR, Flag, choice, count, flag, show_progress
from router.core.placement import POLICIES
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.bench.streams import MeasuredStream, open_session
from tools.fabric_trust import trust_of_running
from tools.failures import CommandError
from tools.models.resolve import model_cache_dir, resolve_model
from tools.simulate.fleet.profile import PROFILES
from tools.supervisor.child_fabric import child_fabric
from tools.supervisor.state import RunFolder
from tools.supervisor.supervised_process import ProcessStatus

MODELLED: Final = "model"
"""In place of an engine: shards that `kvloom simulate` models, in virtual time."""
FABRIC_ONLY: Final = ("model", "device", "max_batch", "num_prompt_words", "max_tokens")
"""The parameters of SHARD_FLAGS and `request_flags` that modelled shards do not have."""
SHARD_SETTINGS: Final = ("model", "device", "data_dir", "num_shards", "max_batch")
"""Those of the options of a bench on a real fabric that `bench_config` takes."""
Device = Literal["cpu", "cuda"]
_BLOCKS_ON_GPU: Final = 8192


MODEL: Final = flag("--model", str, BUILTIN_MODEL_NAME, "Name, directory or .gguf file.", metavar="NAME|PATH")
SHARD_FLAGS: Final = (MODEL, choice("--device", ["cpu", "cuda"], "cpu", "The device of the torch engine."), DATA_DIR)
ENGINE_OR_MODELLED: Final = choice(
    "--engine",
    [MODELLED, "torch", "sim"],
    MODELLED,
    "model: modelled shards in virtual time; otherwise the engine of a fabric that is started.",
)
PROFILE: Final = choice("--profile", sorted(PROFILES), "70b", "The modelled shard: a model and its hardware.")
POLICY: Final = choice("--policy", sorted(POLICIES), "ect", "Placement policy.")
SEED: Final = count("--seed", 1, least=0)


def request_flags(max_tokens: int) -> tuple[Flag, ...]:
    """--max-batch, --prompt-words and --max-tokens, for benches that may also run in virtual time."""
    return (
        count("--max-batch", 8, "Answers that run on a shard at the same time, of a real fabric.", most=256),
        count(
            "--prompt-words",
            40,
            "Numbers in the longest prompt to a real fabric; the shortest has half as many.",
            most=1000,
            to="num_prompt_words",
        ),
        count(
            "--max-tokens",
            max_tokens,
            "Output tokens of the longest answer of a real fabric; the shortest has half as many.",
            least=2,
            most=4000,
        ),
    )


def bench_config(
    engine: str,
    model: str,
    device: Device,
    data_dir: Path | None,
    *,
    num_shards: int = 1,
    max_batch: int | None = None,
) -> KvloomConfig:
    """Fetches the model if it is not there. `max_batch`: None: the default. Raises CommandError."""
    found = resolve_model(model, model_cache_dir(data_dir), show_progress)
    config = KvloomConfig(model=ModelConfig(name=found.name, path=str(found.path)))
    config.shard.engine, config.shard.torch.device = engine, device
    config.shard.num_shards = num_shards
    if max_batch is not None:
        config.shard.max_batch = max_batch
    if device == "cuda":  # several shards share the GPU, and each would take most of the memory that is free
        config.shard.num_blocks = _BLOCKS_ON_GPU
    config.safety.answer_mode = "off"  # it holds the first words back, whose time counts
    return config


def check_engine_options(engine: str, modelled: Collection[str]) -> None:
    """Refuse options of the running command that have no effect with this engine: FABRIC_ONLY, or with a real one
    `modelled`, which only modelled shards have. Raises CommandError."""
    context = click.get_current_context()
    others, wanted = (FABRIC_ONLY, "torch or sim") if engine == MODELLED else (modelled, MODELLED)
    for name in others:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = next(parameter.opts[0] for parameter in context.command.params if parameter.name == name)
            raise CommandError(f"{flag} is for --engine {wanted}")


class BenchFabric(msgspec.Struct, frozen=True):
    """A fabric that runs."""

    model: str
    session: aiohttp.ClientSession
    """Its base URL is the fabric's."""
    folder: RunFolder
    keys: Mapping[str, str]
    """The API key of each tenant."""

    def processes(self, role: str) -> list[ProcessStatus]:
        """Raises CommandError if the fabric has ended."""
        return [process for process in self.folder.require_running().processes if process.role == role]

    async def explain(self, streams: Sequence[MeasuredStream]) -> dict[str, ExplainResponse]:
        """Returns what the router says of each stream, by its name. Raises CommandError."""
        router = self.processes("router")[0]
        return await explain(trust_of_running(self.folder), router.internal_address or router.router_address, streams)

    async def brownout_step(self) -> int:
        """The step on which the router has the model now, of a fabric without API keys. Raises CommandError."""
        url = f"http://{self.processes('router')[0].metrics_address}/metrics"
        try:
            async with aiohttp.request("GET", url) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            raise CommandError(f"the router does not show its metrics: {error}") from error
        return next((int(one.value) for one in samples_in(text) if one.name == "kvloom_router_brownout_step"), 0)


@asynccontextmanager
async def bench_fabric(config: KvloomConfig, tenants: Sequence[str] = ()) -> AsyncIterator[BenchFabric]:
    """Start a fabric in a folder of its own, which is removed at the end, except after a failure, when its logs are of
    use. Each of `tenants` gets an API key, and without any none is needed. Raises CommandError."""
    folder = Path(tempfile.mkdtemp(prefix="kvloom-bench-"))
    keys = {name: draw_key() for name in tenants}
    if keys:
        path = folder / "api_keys"
        write_api_keys(path, [ApiKey(name, digest_of(key)) for name, key in keys.items()])
        config.callers.api_keys_file = str(path)
    try:
        async with child_fabric(config, folder) as url, open_session(url) as session:
            yield BenchFabric(config.model.name, session, RunFolder(folder), keys)
    except CommandError as error:
        raise CommandError(f"{error.message} (the fabric's logs are in {folder / 'logs'})", error.exit_code) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
