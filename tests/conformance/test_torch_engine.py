"""The conformance suite on the torch engine."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest

from shard_server.engines.base import Engine
from tests.conformance.engine_suite import ArithmeticSuite, EngineSuite, OrderSuite
from tests.conformance.torch_engines import BuiltInTorchEngines, ShallowTorchEngines, TinyTorchEngines, TorchEngines


class ShortestPrefillFirst(TorchEngines):
    def make_engine(self, request: pytest.FixtureRequest, **shard_fields: Any) -> Engine:
        return super().make_engine(request, queue_order="shortest_prefill", **shard_fields)


class Int8(TorchEngines):
    """Checks what the kernels promise."""

    torch_fields: ClassVar[dict[str, Any]] = {"weights": "int8"}


class OnDevice(TorchEngines):
    """With the accelerator's runner, here on the CPU: its steps overlap."""

    @pytest.fixture(autouse=True)
    def lent_runner(self) -> None:
        from shard_server.engines.torch_engine.device.runner import load_device_runner

        self.load_runner = functools.partial(load_device_runner, device="cpu", max_rows=32)


class TestTorchEngine(ShallowTorchEngines, EngineSuite):
    pass


class TestTorchEngineShortestPrefillFirst(ShortestPrefillFirst, TinyTorchEngines, OrderSuite):
    pass


class TestTorchEngineInt8(Int8, TinyTorchEngines, ArithmeticSuite):
    pass


@pytest.mark.long
class TestTorchEngineOnAllLayers(BuiltInTorchEngines, EngineSuite):
    pass


@pytest.mark.long
class TestTorchEngineOnAllLayersShortestPrefillFirst(ShortestPrefillFirst, BuiltInTorchEngines, OrderSuite):
    pass


@pytest.mark.long
class TestTorchEngineInt8OnAllLayers(Int8, BuiltInTorchEngines, EngineSuite):
    pass


@pytest.mark.long
class TestTorchEngineOnDevice(OnDevice, TinyTorchEngines, EngineSuite):
    pass
