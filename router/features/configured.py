"""The features of a router that are off by default, as they are configured.

A request meets them only at two hooks of the driver, which are empty while nothing is on: `AnswerObserver` and
`AnswerSink` (router/core_driver.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from kvloom_common.config import KvloomConfig
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.model_routes import ModelRoutes
from kvloom_common.models.rollout_follower import RolloutFollower
from kvloom_common.process.service import StartError
from kvloom_common.receipts.key_files import key_path
from kvloom_common.tenancy.prices import Prices
from kvloom_common.tracing.tracer import Tracer
from kvloom_common.trust.fabric_trust import FabricTrust
from router.continuation_tickets import ContinuationTickets
from router.core.core import RouterCore
from router.core_driver import CoreDriver
from router.features.receipts.writer import ReceiptWriter, chat_template_checksum
from router.features.result_cache.cache import ResultCache, observe
from router.features.result_cache.pieces import pieces_of
from router.features.result_cache.request_key import KEY_BYTES
from router.features.result_cache.shared import SharedResultCache
from router.features.result_recorder import ResultRecorder
from router.features.shadow.traffic import ShadowTraffic
from router.features.tracing import TracingObserver
from router.observer import RouterObserver
from router.records import RouterRecords

if TYPE_CHECKING:
    from router.features.answer_proofs import AnswerProofs


def new_observer(
    tracer: Tracer | None,
    core: RouterCore,
    catalogue: Catalogue,
    routes: ModelRoutes,
    records: RouterRecords,
    tickets: ContinuationTickets | None,
) -> RouterObserver:
    """Return the observer of a router, which writes traces if there is a `tracer`."""
    if tracer is None:
        return RouterObserver(core, catalogue, routes, records, tickets)
    return TracingObserver(tracer, core, catalogue, routes, records, tickets)


class RouterFeatures:
    """Shadow traffic, rollouts, the result cache and receipts of one router."""

    def __init__(
        self,
        config: KvloomConfig,
        driver: CoreDriver,
        core: RouterCore,
        catalogue: Catalogue,
        routes: ModelRoutes,
        trust: FabricTrust,
        policy_revision: Callable[[], str | None],
        prices: Callable[[], Prices],
        registry: CollectorRegistry,
        tracer: Tracer | None,
    ) -> None:
        """`policy_revision`: see ResultRecorder. Raises StartError if the key of receipts cannot be read or made."""
        self._tracer = tracer
        self.shadows = ShadowTraffic(driver, core, catalogue.by_name, registry)
        """Compares answers with those of candidates. It may be changed while the router runs."""
        self.shadows.configure(config.shadows)
        self._rollouts = RolloutFollower(config, trust.sealer, routes, self.shadows.follow_rollouts)
        self.recorder: ResultRecorder | None = None
        """None: there is neither a result cache nor receipts."""
        self.shared_results: SharedResultCache | None = None
        self._proofs = _new_proofs(config, core)
        if self._proofs is not None:
            driver.note_flagged = self._proofs.note
        cache = _new_result_cache(config, catalogue, trust, registry)
        receipts = _new_receipt_writer(config, catalogue, prices)
        if cache is None and receipts is None:
            return
        recorder = self.recorder = ResultRecorder(cache, receipts, policy_revision, time.time)
        driver.set_keeper(recorder)
        driver.on_fleet_change(lambda: recorder.fleet_changed(shard.description for shard in core.shards))
        settings, redis = config.router.result_cache, config.redis
        if settings.enabled and settings.shared and redis.url:
            self.shared_results = SharedResultCache(redis.url, redis.key_prefix, trust.sealer)
            recorder.share(self.shared_results, driver.pass_on)

    @property
    def watched(self) -> tuple[Any, ...]:
        """The parts that are to be followed while the router serves."""
        return tuple(filter(None, (self._rollouts, self.shared_results, self._tracer)))

    @property
    def num_own_requests(self) -> int:
        """Live requests that are no client's."""
        return self.shadows.num_in_flight

    async def clear_results(self, scopes: Collection[str] | None) -> int:
        """Forget the cached answers of some scopes, or all (None). Returns how many this router had. Raises RedisError,
        OSError if the shared answers cannot be cleared."""
        num_answers = 0 if self.recorder is None else self.recorder.clear(scopes)
        if self.shared_results is not None:
            await self.shared_results.clear(scopes)
        return num_answers

    def drain(self) -> None:
        """Take up nothing more."""
        self.shadows.close()

    async def close(self) -> None:
        self.shadows.close()
        if self._proofs is not None:
            self._proofs.close()
        if self.shared_results is not None:
            await self.shared_results.close()


def _new_proofs(config: KvloomConfig, core: RouterCore) -> AnswerProofs | None:
    if not config.safety.audit_dir:
        return None
    from router.features.answer_proofs import AnswerProofs  # only here, for its cryptography

    return AnswerProofs(Path(config.safety.audit_dir), lambda: (shard.description for shard in core.shards))


def _new_result_cache(
    config: KvloomConfig, catalogue: Catalogue, trust: FabricTrust, registry: CollectorRegistry
) -> ResultCache | None:
    settings, models = config.router.result_cache, catalogue.by_name
    if not settings.enabled:
        return None
    cache = ResultCache(
        settings,
        trust.caller_key or (b"shared" if settings.shared else secrets.token_bytes(KEY_BYTES)),
        lambda request, choice: pieces_of(
            models[request.model].tokenizer if request.model in models else None, request, choice
        ),
        lambda request: request.cache_salt,
    )
    observe(cache, registry)
    return cache


def _new_receipt_writer(
    config: KvloomConfig, catalogue: Catalogue, prices: Callable[[], Prices]
) -> ReceiptWriter | None:
    """Raises StartError."""
    settings, models = config.router.receipts, catalogue.by_name
    if not settings.enabled:
        return None
    # Only here, because a router without receipts needs no cryptography.
    from kvloom_common.receipts.keys import ReceiptKeyError, made_or_read

    try:
        signer = made_or_read(key_path(settings.key_file, config.data_dir))
    except ReceiptKeyError as error:
        raise StartError(str(error)) from error
    return ReceiptWriter(signer, prices, lambda model: chat_template_checksum(models.get(model)))
