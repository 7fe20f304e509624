"""Loads malformed files in a process with bounded memory: a crash, a hang and gigabytes are findings, and not the end
of the run.

Started as `python -m tests.fuzz.loader_process`, it reads a line of JSON per file from stdin, {"loader", "path"}, and
answers with {"error": class and message, or null, "seconds"}.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

MAX_EXTRA_BYTES: Final = 768 * 2**20
"""More address space than this, beyond what the libraries took, is refused to the process."""
MAX_SECONDS: Final = 2.0
"""Of CPU time, for one file: a second, with a margin for busy machines."""
REPLY_SECONDS: Final = 60.0
"""The first file of a kind waits for its libraries, which a busy machine loads slowly."""


Loader = tuple[Callable[[Path], object], type[Exception]]
"""What loads a file, and the error that it documents."""


def loader_of(name: str) -> Loader:
    """Each imports only what it needs: torch takes seconds."""
    match name:
        case "gguf":
            from shard_server.engines.base import EngineError
            from shard_server.engines.torch_engine.checkpoint.gguf_conversion import convert_gguf

            def convert(path: Path) -> None:
                with tempfile.TemporaryDirectory(dir=path.parent) as out:
                    convert_gguf(path, Path(out))

            return convert, EngineError
        case "safetensors":
            from shard_server.engines.base import EngineError
            from shard_server.engines.torch_engine.checkpoint.weights import load_weights
            from shard_server.engines.torch_engine.config import load_config

            return (lambda path: load_weights(path.parent, load_config(path.parent))), EngineError
        case "model_config":
            from shard_server.engines.base import EngineError
            from shard_server.engines.torch_engine.config import load_config

            return (lambda path: load_config(path.parent)), EngineError
        case "tokenizer":
            from kvloom_common.text.tokenizer import ModelTokenizer

            return (lambda path: ModelTokenizer.load(path.parent).close()), ValueError
        case "policy":
            from safety_svc.policy import PolicyError, load_policy

            return load_policy, PolicyError
        case "kvloom_config":
            from kvloom_common.config import ConfigError
            from kvloom_common.config import load_config as load_kvloom_config

            return load_kvloom_config, ConfigError
        case "api_keys":
            from kvloom_common.access.api_keys import read_api_keys
            from kvloom_common.config import ConfigError

            return read_api_keys, ConfigError
        case _:
            raise KeyError(name)


def serve() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    known: dict[str, Loader] = {}
    for line in sys.stdin:
        order = json.loads(line)
        name = order["loader"]
        if name not in known:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            known[name] = loader_of(name)
            limit = _address_space_bytes() + MAX_EXTRA_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        load, documented = known[name]
        begin = time.process_time()
        fault: dict[str, Any] | None = None
        try:
            load(Path(order["path"]))
        except documented as error:
            fault = {"documented": True, "kind": type(error).__name__, "message": str(error)}
        except BaseException as error:  # also the panics of Rust libraries
            fault = {"documented": False, "kind": type(error).__name__, "message": str(error)[:500]}
        sys.stdout.write(json.dumps({"error": fault, "seconds": time.process_time() - begin}) + "\n")
        sys.stdout.flush()


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class LoaderProcess:
    """The parent's side."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def check(self, loader: str, path: Path) -> None:
        """Raises AssertionError unless the file is loaded, or refused by one clear error that names it."""
        reply = await self._reply(loader, path)
        assert reply["seconds"] < MAX_SECONDS, f"{reply['seconds']:.1f} s: {reply['error']}"
        if (error := reply["error"]) is None:
            return
        assert error["documented"], f"{error['kind']}: {error['message']}"
        message = error["message"]
        assert path.name in message or path.parent.name in message, message
        assert "Traceback" not in message
        assert len(message) < 2000, message[:300]

    async def _reply(self, loader: str, path: Path) -> dict[str, Any]:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.fuzz.loader_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=2**20,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"loader": loader, "path": str(path)}).encode() + b"\n")
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                line = await process.stdout.readline()
        except TimeoutError:
            await self.close()
            raise AssertionError(f"{loader} hangs") from None
        if not line:
            status = await process.wait()
            self._process = None
            raise AssertionError(f"{loader} ended the process with status {status}")
        return json.loads(line)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.communicate()


if __name__ == "__main__":
    serve()
