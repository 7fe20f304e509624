"""`kvloom doctor`: checks that an engine works on this machine. Operators run it on the machine in question."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import inspect
import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import click
import structlog

from kvloom_common.config import KvloomConfig
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Engine, EngineError
from shard_server.engines.create import create_engine
from shard_server.engines.engine_kinds import BUILT_IN, engine_kind, imported
from tools.doctor.checks import CheckFailedError, CheckSkippedError, checks_of
from tools.doctor.session import KV_EVENT_SECONDS, EngineSession
from tools.failures import CommandError
from tools.interpreter import interpreter_name
from tools.options import EngineName, FabricFlags, choose_data_dir, fabric_options, option

CHECK_SECONDS: Final = 300.0
CLOSE_SECONDS: Final = 90.0
_SIGNS: Final = {"ok": "✓", "failed": "✗", "skipped": "–"}
_PACKAGES: Final = ("kvloom", "grpcio", "protobuf", *(name for kind in BUILT_IN.values() for name in kind.packages))

Report = Callable[["Result"], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    name: str
    outcome: Literal["ok", "failed", "skipped"]
    detail: str
    seconds: float
    expected: str = ""
    """The fact that the check proves, or that the library should have."""


async def examine(config: KvloomConfig, report: Report, *, kv_event_seconds: float = KV_EVENT_SECONDS) -> list[Result]:
    """Run all checks on the engine in `config` and report one after another. Never raises for an error of the
    engine."""
    results: list[Result] = []

    def add(
        name: str, outcome: Literal["ok", "failed", "skipped"], detail: str, begin: float, expected: str = ""
    ) -> None:
        results.append(Result(name, outcome, detail, round(time.perf_counter() - begin, 3), expected))
        report(results[-1])

    add("versions", "ok", _versions(), time.perf_counter())
    begin = time.perf_counter()
    try:
        add("GPU", "ok", await asyncio.to_thread(_gpu, config.shard.engine), begin)
    except (CheckFailedError, CheckSkippedError) as problem:
        add("GPU", "skipped" if isinstance(problem, CheckSkippedError) else "failed", str(problem), begin)
    if reference := engine_kind(config.shard.engine).library_rows:
        # Before the start, which a version may refuse because of one of these.
        for row in await asyncio.to_thread(imported(reference)):
            add(row.name, "ok" if row.is_whole else "skipped", row.seen, time.perf_counter(), row.expected)
    begin = time.perf_counter()
    try:
        tokenizer = await asyncio.to_thread(ModelTokenizer.load, Path(config.model.path))
        engine = create_engine(config, tokenizer)
        await engine.start()
    except (EngineError, OSError, ValueError) as error:
        add("start", "failed", str(error), begin)
        return results
    info = engine.info
    add(
        "start",
        "ok",
        f"{info.description or info.engine}; {info.num_blocks} blocks, window {info.max_model_len} tokens",
        begin,
    )
    async with EngineSession(engine, tokenizer, kv_event_seconds=kv_event_seconds) as session:
        for name, check in checks_of(info):
            begin = time.perf_counter()
            expected = inspect.getdoc(check) or ""
            try:
                async with asyncio.timeout(CHECK_SECONDS):
                    add(name, "ok", await check(session), begin, expected)
            except CheckSkippedError as skipped:
                add(name, "skipped", str(skipped), begin, expected)
            except Exception as error:
                add(name, "failed", _reason(error), begin, expected)
                if isinstance(error, EngineError):
                    break  # the engine is dead or accepts nothing, so that the other checks would fail too
    await _close(engine, add)
    tokenizer.close()
    return results


async def _close(engine: Engine, add: Callable[[str, Any, str, float], None]) -> None:
    begin = time.perf_counter()
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await engine.close()
        add("close", "ok", "", begin)
    except Exception as error:
        add("close", "failed", _reason(error), begin)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"not done within {CHECK_SECONDS:g} s"
    return str(error) if isinstance(error, (CheckFailedError, EngineError, TimeoutError)) else repr(error)


def _versions() -> str:
    found = [interpreter_name()]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _gpu(engine: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        if engine_kind(engine).needs_nvidia_gpu:
            raise CheckFailedError("nvidia-smi is not found: there is no NVIDIA driver here")
        raise CheckSkippedError(f"no NVIDIA driver here, and the engine {engine} needs none")
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckFailedError(f"nvidia-smi does not answer: {error}") from error
    if done.returncode or not done.stdout.strip():
        raise CheckFailedError(f"nvidia-smi: {(done.stderr or done.stdout).strip()}")
    return "; ".join(line.strip() for line in done.stdout.strip().splitlines())


def is_healthy(results: list[Result]) -> bool:
    return all(result.outcome != "failed" for result in results)


@click.command("engine")
@option(
    "--engine",
    "engine_name",
    scope="doctor",
    type=EngineName(),
    metavar="torch|sim|tensorrt_llm|NAME",
    help="The engine. NAME: that of a plugin.  [default: that of the --config file]",
)
@option(
    "--model",
    scope="doctor",
    help="The name of a model, its directory or a .gguf file.  [default: that of the --config file]",
)
@fabric_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_engine(engine_name: str | None, model: str | None, fabric: FabricFlags, as_json: bool) -> None:
    """Check that an engine does on this machine what kvloom relies on. The exit status is 1 if a check fails."""
    config = fabric.load_config()
    if engine_name is not None:
        config.shard.engine = engine_name
    if shorten_steps := engine_kind(config.shard.engine).shorten_steps:
        shorten_steps(config.shard)
    _log_to_stderr()
    _choose_model(config, model, choose_data_dir(fabric.data_dir, config))

    def report(result: Result) -> None:
        if not as_json:
            detail = f": {result.detail}" if result.detail else ""
            click.echo(f"{_SIGNS[result.outcome]} {result.name}{detail}", err=True)

    results = asyncio.run(examine(config, report))
    healthy = is_healthy(results)
    if as_json:
        checks = [dataclasses.asdict(result) for result in results]
        summary = {"engine": config.shard.engine, "model": config.model.name, "ok": healthy, "checks": checks}
        click.echo(json.dumps(summary))
    else:
        click.echo(_table(results))
        num_failed = sum(result.outcome == "failed" for result in results)
        click.echo("all is well" if healthy else f"{num_failed} of {len(results)} checks failed")
    raise SystemExit(0 if healthy else 1)


def _table(results: Sequence[Result]) -> str:
    """Feature, expectation and what was seen, to be read by people and sent to us."""
    rows = [("", "feature", "expected", "seen")]
    rows += [(_SIGNS[one.outcome], one.name, " ".join(one.expected.split()), one.detail) for one in results]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = (
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3])) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _log_to_stderr() -> None:
    """Log warnings of the engine to stderr, because stdout is for the report."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.__stderr__),
    )


def _choose_model(config: KvloomConfig, model: str | None, data_dir: Path) -> None:
    """Set config.model. A directory does not need the torch engine, which a GPU image may not have."""
    if model is None and config.model.path:
        return
    if model is not None and Path(model).expanduser().is_dir():
        path = Path(model).expanduser().absolute()
        config.model.name, config.model.path = path.name.lower(), str(path)
        return
    if engine_kind(config.shard.engine).needs_model_dir:
        raise CommandError(f"--model must be the directory of a model for the engine {config.shard.engine}")
    from tools.models.registry import ModelRegistry
    from tools.models.resolve import model_cache_dir, resolve_model

    found = resolve_model(
        model or KvloomConfig().model.name,
        model_cache_dir(data_dir),
        lambda message: click.echo(message, err=True),
        ModelRegistry(data_dir / "models.json"),
    )
    config.model.name, config.model.path = found.name, str(found.path)
