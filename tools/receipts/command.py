"""The commands of `kvloom receipts` but `collect` (tools/cli/collect_receipts.py): the public keys, and saving and
verifying receipts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

import click
import msgspec
import structlog

from kvloom_common.config import KvloomConfig
from kvloom_common.receipts.key_files import key_path, public_path
from kvloom_common.receipts.keys import PublicKeys, ReceiptKeyError, made_or_read, read_public_keys
from kvloom_common.receipts.receipt import MAX_BUNDLE_BYTES, Bundle, decode_bundle, encode_bundle
from kvloom_common.text.model_checksum import ChecksumError
from shard_server.engines.base import EngineError
from tools.failures import CommandError
from tools.models.registry import ModelRegistry
from tools.models.resolve import resolve_model
from tools.options import FabricFlags, choose_data_dir, fabric_options, option
from tools.receipts.verify import ReceiptVerdict, check, rerun_all, sample_of


class AdapterAt(click.ParamType):
    """NAME=DIRECTORY, as (name, path)."""

    name = "NAME=DIRECTORY"

    def convert(
        self, value: str | tuple[str, Path], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Path]:
        if isinstance(value, tuple):
            return value
        name, _, path = value.partition("=")
        if not name or not Path(path).is_dir():
            self.fail(f"{value!r} is not NAME=DIRECTORY of an adapter", param, ctx)
        return name, Path(path)


@click.command()
@fabric_options
def key(fabric: FabricFlags) -> None:
    """Print the public keys with which this fabric's receipts are verified. The key is made if there is none."""
    config = fabric.load_config()
    path = key_path(config.router.receipts.key_file, str(choose_data_dir(fabric.data_dir, config)))
    try:
        made_or_read(path)
        keys = read_public_keys(public_path(path))
    except ReceiptKeyError as error:
        raise CommandError(str(error)) from error
    print(msgspec.json.format(msgspec.json.encode(keys)).decode())


@click.command()
@click.argument("response", type=click.File("r", encoding="utf-8"), default="-")
@option(
    "--out", scope="receipts", required=True, type=click.Path(path_type=Path, dir_okay=False),
    help="The file to which the receipts are appended, one a line.",
)  # fmt: skip
def save(response: TextIO, out: Path) -> None:
    """Take the receipts out of RESPONSE (the JSON of an answer, or a stream of events; - for the standard input) and
    keep them, each with what is needed to compute its answer again."""
    found = _bundles(response.read(), response.name)
    try:
        with out.open("ab") as file:
            file.writelines(encode_bundle(bundle) + b"\n" for bundle in found)
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror}") from error
    print(f"saved {len(found)} to {out}")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@option("--model", scope="receipts", metavar="NAME|PATH", help="The model, to compute answers again with it.")
@option(
    "--adapter",
    "adapters",
    scope="receipts",
    multiple=True,
    type=AdapterAt(),
    help="An adapter of --model, for the answers that were computed with it. May be repeated.",
)
@option(
    "--key", "key_file", scope="receipts", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The published keys, from /.well-known/kvloom-receipts.json.  [default: those in DATA_DIR]",
)  # fmt: skip
@option("--sample", scope="receipts", type=click.IntRange(min=1), help="Compute so many of them again, not all.")
@option("--seed", scope="receipts", type=int, default=0, show_default=True, help="The seed by which --sample chooses.")
@option("--json", "as_json", scope="receipts", is_flag=True, help="Print one JSON object a line.")
@fabric_options
def verify(
    files: Sequence[Path],
    model: str | None,
    adapters: Sequence[tuple[str, Path]],
    key_file: Path | None,
    sample: int | None,
    seed: int,
    as_json: bool,
    fabric: FabricFlags,
) -> None:
    """Check signatures, digests, counts and prices of the receipts in FILES, and compute their answers again.

    Without --model nothing is computed. With it, the engine is that of --config (`shard.engine`, `shard.torch`), by
    default torch. Exits with 1 if anything is wrong, and with 2 if all is well but some answers could not be compared.
    """
    config = fabric.load_config()
    home = choose_data_dir(fabric.data_dir, config)
    keys = _keys(key_file, config, home)
    bundles = [bundle for file in files for bundle in _bundles(file.read_text("utf-8", "replace"), str(file))]
    verdicts = [check(bundle, keys) for bundle in bundles]
    if model is not None:
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what the engine logs
        chosen = sample_of(bundles, sample, seed)
        registry = ModelRegistry(home / "models.json")
        resolved = resolve_model(model, home / "models", lambda line: click.echo(line, err=True), registry)
        config.model.path, config.model.name = str(resolved.path), resolved.name
        try:
            asyncio.run(_rerun(bundles, verdicts, chosen, config, dict(adapters)))
        except (EngineError, ChecksumError, OSError, ValueError) as error:
            raise CommandError(f"{model} cannot be loaded: {error}") from error
    for verdict in verdicts:
        _print(verdict, as_json=as_json)
    _summarise(verdicts, has_model=model is not None, as_json=as_json)


async def _rerun(
    bundles: Sequence[Bundle],
    verdicts: list[ReceiptVerdict],
    chosen: Sequence[int],
    config: KvloomConfig,
    adapters: Mapping[str, Path],
) -> None:
    position = iter(chosen)
    async for faults, reason in rerun_all([bundles[i] for i in chosen], config, adapters):
        i = next(position)
        verdicts[i] = msgspec.structs.replace(
            verdicts[i], faults=[*verdicts[i].faults, *faults], is_rerun=not reason, not_rerun_because=reason
        )


def _summarise(verdicts: Sequence[ReceiptVerdict], *, has_model: bool, as_json: bool) -> None:
    num_faulty = sum(bool(verdict.faults) for verdict in verdicts)
    num_rerun = sum(verdict.is_rerun for verdict in verdicts)
    num_incomparable = sum(bool(verdict.not_rerun_because) for verdict in verdicts)
    if not as_json:
        parts = [f"{len(verdicts)} receipts", f"{num_faulty} with faults"]
        if has_model:
            parts.append(f"{num_rerun} computed again")
        if num_incomparable:
            parts.append(f"{num_incomparable} that cannot be compared here")
        print(", ".join(parts))
    if num_faulty or num_incomparable:
        sys.exit(1 if num_faulty else 2)


def _print(verdict: ReceiptVerdict, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(_as_object(verdict)).decode())
        return
    for fault in verdict.faults:
        print(f"{verdict.request_id}: {fault.part}: {fault.message}")
    if verdict.not_rerun_because:
        print(f"{verdict.request_id}: not computed again: {verdict.not_rerun_because}")


def _as_object(verdict: ReceiptVerdict) -> dict[str, Any]:
    faults = [fault._asdict() for fault in verdict.faults]
    return msgspec.structs.asdict(verdict) | {"faults": faults}


def _keys(given: Path | None, config: KvloomConfig, home: Path) -> PublicKeys:
    try:
        return read_public_keys(given or public_path(key_path(config.router.receipts.key_file, str(home))))
    except ReceiptKeyError as error:
        raise CommandError(f"{error} (--key FILE, from /.well-known/kvloom-receipts.json)") from error


def _bundles(text: str, name: str) -> list[Bundle]:
    try:
        found = bundles_in(text)
    except ValueError as error:
        raise CommandError(f"{name}: {error}") from error
    if not found:
        raise CommandError(f"{name} has no receipt: ask for one by x-kvloom-receipt: true")
    return found


_PARTS: Final = frozenset({"receipt", "signature", "key_id", "request", "output"})
_MAX_DEPTH: Final = 64


def bundles_in(text: str) -> list[Bundle]:
    """The receipts in a JSON document, in lines of JSON, or in a stream of server-sent events. Raises ValueError with
    what is wrong."""
    found: dict[str, Bundle] = {}
    for document in _documents(text):
        for raw in _raw_bundles(document):
            encoded = json.dumps(raw)
            if len(encoded) > MAX_BUNDLE_BYTES:
                raise ValueError(f"a receipt has {len(encoded)} bytes; at most {MAX_BUNDLE_BYTES} are read")
            bundle = decode_bundle(encoded)
            found[bundle.signature] = bundle  # some APIs repeat the whole answer in their last events
    return list(found.values())


def _documents(text: str) -> Iterator[Any]:
    with contextlib.suppress(ValueError):
        whole = json.loads(text)
        yield whole
        return
    for line in text.splitlines():
        content = line.removeprefix("data:").strip()
        if not content.startswith("{"):
            continue
        try:
            yield json.loads(content)
        except ValueError as error:
            raise ValueError(f"a line is no JSON: {error}") from error


def _raw_bundles(value: Any, depth: int = 0) -> Iterator[Any]:
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        if value.keys() >= _PARTS:
            yield value
            return
        for item in value.values():
            yield from _raw_bundles(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _raw_bundles(item, depth + 1)
