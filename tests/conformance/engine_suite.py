"""What every implementation of `Engine` that generates text must do. test_*_engine.py run it; adding an engine is one
class in a file of its own."""

from __future__ import annotations

from tests.conformance.adapter_suite import AdapterSuite
from tests.conformance.embedding_suite import EmbeddingSuite
from tests.conformance.kv_share_suite import KvShareSuite
from tests.conformance.prefix_cache_suite import PrefixCacheSuite
from tests.conformance.sampling_suite import SamplingSuite
from tests.conformance.scheduling_suite import SchedulingSuite
from tests.conformance.started_engines import BLOCK_SIZE, StartEngine
from tests.conformance.vision_suite import VisionSuite


class OrderSuite(SchedulingSuite, PrefixCacheSuite, KvShareSuite):
    """What the order of those that wait has a bearing on: engines run it once more for every order they have."""


class ArithmeticSuite(PrefixCacheSuite, SamplingSuite, AdapterSuite, EmbeddingSuite):
    """What depends on how an engine computes: it is run once more for other weights."""


class EngineSuite(OrderSuite, ArithmeticSuite, VisionSuite):
    """A subclass defines `make_engine`, as in StartedEngines, and `adapter_path` if the engine takes adapters."""

    async def test_info_is_complete_once_started(self, start: StartEngine) -> None:
        """The hello to routers is built from it."""
        info = (await start(max_model_len=256)).engine.info
        assert info.block_size == BLOCK_SIZE
        assert info.max_batch == 16
        assert info.max_model_len == 256
        assert info.num_blocks * info.block_size >= info.max_model_len
        assert info.vocab_size > max(info.eos_token_ids)
        assert info.engine
        assert info.model
