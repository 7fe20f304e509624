"""Generates the gRPC stubs into kvloom/v1 whenever the SDK is built or installed, so that no wheel is without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Raises RuntimeError if protoc refuses a file; its message is on stderr then."""
        from grpc_tools import protoc  # a build dependency

        root = Path(self.root)
        well_known = Path(protoc.__file__).parent / "_proto"
        protos = sorted(str(path) for path in (root / "protos").rglob("*.proto"))
        outputs = [f"--{kind}_out={root}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-I{root / 'protos'}", f"-I{well_known}", *outputs, *protos]):
            raise RuntimeError("protoc could not generate the gRPC stubs")
