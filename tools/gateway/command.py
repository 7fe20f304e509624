"""`kvloom epp`: serves an Envoy the choice of an engine for each request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import click
import grpc.aio
import structlog
from prometheus_client import REGISTRY

from kvloom.v1.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server
from kvloom_common.access.listener_tls import listener_tls
from kvloom_common.config import ConfigError, KvloomConfig
from kvloom_common.metrics.server import MetricsServer
from kvloom_common.process import service
from kvloom_common.process.log_lines import configure_logging
from kvloom_common.process.watched_files import WatchedFiles, Watcher, following
from kvloom_common.text.tokenizer import ModelTokenizer
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.transport.standard_services import add_health_and_reflection
from tools.failures import CommandError
from tools.gateway.inference_pool import InferencePool
from tools.gateway.kubernetes_api import KubernetesApi
from tools.gateway.picker_service import SERVICE_NAME, Gateway
from tools.gateway.pool import Pool, pool_of, read_pool
from tools.gateway.prompts import PromptReader
from tools.options import check_listener, config_option, listener_options, load_config_file, option

NAME: Final = "epp"
MAX_CONCURRENT_RPCS: Final = 16_384
"""Envoy has one for each request, until its answer has ended."""

log = structlog.get_logger()


@click.command()
@option(
    "--pool",
    "pool_file",
    scope="epp",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A TOML file with the engines. It is read again when it changes.",
)
@option("--endpoint", "addresses", scope="epp", multiple=True, metavar="IP:PORT", help="An engine, instead of a file.")
@option(
    "--inference-pool",
    scope="epp",
    metavar="NAMESPACE/NAME",
    help="The InferencePool whose pods are the engines, with its InferenceObjectives. A file gives the rest.",
)
@option(
    "--kubernetes-api",
    scope="epp",
    default="",
    metavar="URL",
    help="Where its API is reached without credentials, e.g. by `kubectl proxy`.  [default: as a pod does]",
)
@option(
    "--tokenizer",
    "tokenizer_dir",
    scope="epp",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The directory with the model's tokenizer and chat template, which KV events need.",
)
@listener_options("epp", "Envoy", port=9002)
@config_option
def epp(
    pool_file: Path | None,
    addresses: tuple[str, ...],
    inference_pool: str | None,
    kubernetes_api: str,
    tokenizer_dir: Path | None,
    host: str,
    port: int,
    metrics_port: int | None,
    insecure: bool,
    config_file: Path | None,
) -> None:
    """Choose the engine of each request for an Envoy in front of vLLM, SGLang or TensorRT-LLM: an endpoint picker of
    the Gateway API (docs/how-to/gateway.md)."""
    config = load_config_file(config_file)
    namespace, slash, name = (inference_pool or "").partition("/")
    if inference_pool is not None and not (namespace and slash and name):
        raise CommandError("--inference-pool is NAMESPACE/NAME")
    if inference_pool is None and (pool_file is None) == (not addresses):
        raise CommandError("give either --pool FILE, --endpoint IP:PORT or --inference-pool NAMESPACE/NAME")
    if inference_pool is not None and addresses:
        raise CommandError("--inference-pool has the endpoints: remove --endpoint")
    check_listener(host, config, "prompts can be read on their way", insecure=insecure)
    try:
        pool = pool_of(addresses)
        if pool_file is not None:
            pool = read_pool(pool_file, has_endpoints=inference_pool is None)
        api = None if inference_pool is None else KubernetesApi(kubernetes_api)
        tokenizer = None if tokenizer_dir is None else ModelTokenizer.load(tokenizer_dir)
    except (ConfigError, ValueError) as error:
        raise CommandError(str(error)) from error
    if tokenizer is None and any(endpoint.kv_events for endpoint in pool.endpoints):
        raise CommandError("KV events name blocks by their tokens: give --tokenizer DIR, or remove kv_events")

    def follow(gateway: Gateway) -> Watcher | None:
        if api is not None:
            return InferencePool(api, namespace, name, pool, gateway.use_pool)
        return None if pool_file is None else _PoolFile(pool_file, gateway)

    service.run_service(_serve(config, pool, follow, tokenizer, host, port, metrics_port))


class _PoolFile:
    """Follows the file of the pool."""

    def __init__(self, path: Path, gateway: Gateway) -> None:
        self._path = path
        self._gateway = gateway
        self._files = WatchedFiles([path])

    async def watch(self) -> None:
        await self._files.follow("pool of engines", lambda: read_pool(self._path), self._gateway.use_pool)


async def _serve(
    config: KvloomConfig,
    pool: Pool,
    follow: Callable[[Gateway], Watcher | None],
    tokenizer: ModelTokenizer | None,
    host: str,
    port: int,
    metrics_port: int | None,
) -> None:
    """`follow` returns what follows the pool, if anything does. Raises StartError and ConfigError."""
    configure_logging(config.log, NAME)
    stop = service.stop_event()
    tls = listener_tls(config.tls)
    metrics = None if metrics_port is None else MetricsServer(config, metrics_port)
    server = grpc.aio.server(options=service.SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS)
    health = add_health_and_reflection(server, [SERVICE_NAME], with_reflection=False)
    gateway = Gateway(pool, PromptReader(pool.adapters, tokenizer), health, REGISTRY)
    add_ExternalProcessorServicer_to_server(gateway, CheckedServer(server))
    address = service.bind(server, host, port, tls.add_port if tls is not None else service.NO_SECRET.add_port)
    await gateway.start()
    await server.start()
    async with following(*filter(None, (tls, metrics, follow(gateway)))):
        log.info("epp_started", address=address, num_endpoints=len(pool.endpoints))
        await stop.wait()
        for name in (SERVICE_NAME, "readiness", ""):
            await service.set_serving(health, [name], serving=False)
        await server.stop(None)
        await gateway.close()
