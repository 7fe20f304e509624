"""The router's end of one shard's data plane: `ShardService.Connect`, kept up for as long as the shard is registered.

Submits and cancels collect while a frame is being written and are sent together in the next one. When the stream
breaks, or stalls so long that keepalive gives up, the link reports to the core that the shard is down and reconnects.
"""

from __future__ import annotations

import asyncio
import functools
from itertools import zip_longest
from typing import Any, Final

import grpc
import structlog

from kvloom.errors import KvloomError
from kvloom.text.token_ids import BYTES_PER_ID
from kvloom.transport.frame_writer import FrameWriter
from kvloom.transport.local_client import connect_local
from kvloom.transport.local_stream import LocalStream, deliver
from kvloom.v1 import shard_service_pb2, shard_service_pb2_grpc
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.models.card_service import fetch_card
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.model_card import ModelCardError
from kvloom_common.process.cancellation import raise_if_cancelled
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from router import convert
from router.core.actions import CancelOnShard, SubmitAttempt
from router.core.events import (
    AdaptersReported,
    FrameArrived,
    KvEventsArrived,
    KvSnapshotArrived,
    LoadReported,
    ShardDown,
    ShardUp,
    StepArrived,
    TokensOnlyFrame,
)
from router.core_driver import CoreDriver
from router.links.fleet_links import LinkTarget
from router.links.reconnect import CONNECT_TIMEOUT_SECONDS, LINK_OPTIONS, LinkError, cause_of, reconnect_backoff
from router.links.tokenizer_claims import TokenizerClaims

log = structlog.get_logger()

MAX_WAITING_SUBMITS: Final = 16_384
MAX_FRAME_BYTES: Final = 4 * 2**20
"""Submits beyond this size wait for the next frame. With one more it is far below the limit of a gRPC message."""

ConnectCall = (
    LocalStream[shard_service_pb2.ShardServiceConnectResponse, shard_service_pb2.ShardServiceConnectRequest]
    | grpc.aio.StreamStreamCall[
        shard_service_pb2.ShardServiceConnectRequest, shard_service_pb2.ShardServiceConnectResponse
    ]
)


class ShardLink:
    """The link to one shard of the registry. `run` is its only task. The fleet watcher keeps `target` up to date."""

    def __init__(
        self,
        record: ShardRecord,
        router_id: str,
        driver: CoreDriver,
        trust: FabricTrust = NO_SECRET,
        catalogue: Catalogue | None = None,
        tokenizers: TokenizerClaims | None = None,
    ) -> None:
        """`catalogue` gets the card of the shard's model before the core knows of the shard. `tokenizers` are those of
        all shards of the router."""
        self.target = LinkTarget(record)
        self._catalogue = catalogue
        self._tokenizers = tokenizers or TokenizerClaims()
        self._reported_refusal = ""
        self._router_id = router_id
        self._driver = driver
        self._trust = trust
        self.tried = asyncio.Event()
        """Set once the core knows this shard, or it could not be reached."""
        self._connected = False
        self._packs_token_ids = False
        """True when the connected shard reads packed token ids."""
        self._submits: list[SubmitAttempt] = []
        self._cancels: dict[int, int | None] = {}
        """Slot -> how many of its tokens had arrived, or None if the sequence is resumed elsewhere."""
        self._want_kv_snapshot = False
        self._next_kv_number: int | None = None
        """The number that the next batch of KV events has if there is no gap; None if it is not known."""
        self._writer: FrameWriter[shard_service_pb2.ShardServiceConnectRequest] | None = None
        """The writer of the current connection."""

    @property
    def record(self) -> ShardRecord:
        """The shard, as the registry names it."""
        return self.target.record

    @property
    def connected(self) -> bool:
        """True when the core regards this shard as up."""
        return self._connected

    async def run(self) -> None:
        """Connects, serves and reconnects with backoff, until the shard is neither registered nor connected."""
        backoff = reconnect_backoff()
        while self.target.registered:
            started = self._driver.now()
            try:
                await self._serve_one_connection()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, LinkError, KvloomError, TimeoutError) as error:
                log.info("shard_link_broke", shard_id=self.record.shard_id, cause=cause_of(error))
            except Exception:
                log.exception("shard_link_failed", shard_id=self.record.shard_id)
            raise_if_cancelled()
            self.tried.set()
            if self.target.registered:
                await asyncio.sleep(backoff.next_seconds(self._driver.now() - started))

    # -- ShardSink ----------------------------------------------------------------------------------------------------

    def submit(self, attempt: SubmitAttempt) -> None:
        if self._cancels:
            # A slot is reused only after the end of its sequence has arrived, so a cancel that still waits is for the
            # earlier sequence.
            for choice in attempt.choices:
                self._cancels.pop(choice.slot, None)
        self._submits.append(attempt)
        if len(self._submits) == MAX_WAITING_SUBMITS and self._writer is not None:
            log.error("shard_stalled", shard_id=self.record.shard_id)
            self._writer.give_up()  # The reader then ends the connection.
        self._wake_writer()

    def cancel(self, cancel: CancelOnShard) -> None:
        self._cancels.update(zip_longest(cancel.slots, cancel.num_output_tokens))
        self._wake_writer()

    def want_kv_snapshot(self) -> None:
        self._want_kv_snapshot = True
        self._wake_writer()

    # -- one connection -----------------------------------------------------------------------------------------------

    async def _serve_one_connection(self) -> None:
        """Returns when the shard ends the stream cleanly, and raises when the stream breaks."""
        async with self._open_channel() as channel:
            local = await connect_local(self.record.address, shard_service_pb2.ShardServiceConnectResponse)
            call: ConnectCall = local or shard_service_pb2_grpc.ShardServiceStub(channel).Connect()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                    first = await self._greet(call)
                self._claim_tokenizer(first.hello.info)
                await self._learn_model(first.hello.info, channel)
                await self._serve_frames(call, first)
            finally:
                self._tokenizers.release(self)
                call.cancel()

    def _open_channel(self) -> grpc.aio.Channel:
        """Only the shard that the record names is accepted: another may since listen at its address."""
        record = self.record
        return self._trust.open_channel(record.address, "shard", record.shard_id, options=LINK_OPTIONS)

    async def _greet(self, call: ConnectCall) -> shard_service_pb2.ShardServiceConnectResponse:
        hello = shard_service_pb2.RouterHello(router_id=self._router_id)
        await call.write(shard_service_pb2.ShardServiceConnectRequest(hello=hello))
        first = await call.read()
        if not isinstance(first, shard_service_pb2.ShardServiceConnectResponse) or not first.HasField("hello"):
            raise LinkError("the shard's first frame was no hello")
        info = first.hello.info
        if refusal := self.target.refusal(info.shard_id, info.incarnation_id):
            raise LinkError(refusal)
        self.target.accept(info.incarnation_id)
        return first

    def _claim_tokenizer(self, info: shard_service_pb2.ShardInfo) -> None:
        """Raises LinkError for a shard whose tokenizer is not that of the other shards of its model."""
        refusal = self._tokenizers.claim(self, info.shard_id, info.model, info.tokenizer_checksum)
        if refusal and refusal != self._reported_refusal:  # it is tried again and again
            log.warning("shard_refused", shard_id=info.shard_id, cause=refusal)
        self._reported_refusal = refusal
        if refusal:
            raise LinkError(refusal)

    async def _learn_model(self, info: shard_service_pb2.ShardInfo, channel: grpc.aio.Channel) -> None:
        """Fetch the model's card if this router does not have it. Raises LinkError."""
        if self._catalogue is None or not info.card_checksum:
            return
        try:
            await self._catalogue.ensure(
                info.model, info.card_checksum, lambda: fetch_card(channel, info.model, info.card_checksum)
            )
        except (KvloomError, ModelCardError) as error:
            raise LinkError(f"the card of {info.model} cannot be used: {error}") from error

    async def _serve_frames(self, call: ConnectCall, first: shard_service_pb2.ShardServiceConnectResponse) -> None:
        shard_id = self.record.shard_id
        # Whatever still waits was meant for an earlier connection.
        self._submits.clear()
        self._cancels.clear()
        self._want_kv_snapshot = False
        self._next_kv_number = None
        self._driver.add_shard(shard_id, self)
        self._connected = True
        self._packs_token_ids = first.hello.reads_packed_token_ids
        self._writer = FrameWriter(call, self._take_frame)
        writer = asyncio.create_task(self._write_frames(self._writer, call), name=f"{shard_id} writer")
        try:
            self._driver.dispatch(ShardUp(convert.shard_from_proto(first.hello.info)))
            log.info("shard_joined", shard_id=shard_id, address=self.record.address)
            self._on_frame(first)
            self.tried.set()
            await deliver(call, shard_service_pb2.ShardServiceConnectResponse, self._on_frame)
        finally:
            self._connected = False
            self._writer = None
            self._driver.remove_shard(shard_id)
            writer.cancel()
            self._driver.dispatch(ShardDown(shard_id))
            log.info("shard_left", shard_id=shard_id)
            await asyncio.gather(writer, return_exceptions=True)

    def _on_frame(self, frame: shard_service_pb2.ShardServiceConnectResponse) -> None:
        """Cache and load events come before the step of the same frame, so that they are known when the step's
        finishes let the core place waiting requests."""
        shard_id = self.record.shard_id
        step = convert.step_from_frame(frame.step) if frame.HasField("step") else None
        if self._is_steady(frame) and step is not None and step.is_plain:
            read_rest = functools.partial(convert.kv_events_and_load_from_frame, shard_id, frame)
            self._driver.dispatch(TokensOnlyFrame(shard_id, step, read_rest))
            return
        parts: list[KvSnapshotArrived | KvEventsArrived | LoadReported | AdaptersReported | StepArrived] = []
        if frame.HasField("kv_snapshot"):
            snapshot = frame.kv_snapshot
            parts.append(KvSnapshotArrived(shard_id, snapshot.number, snapshot.block_hashes[:]))
        parts += convert.kv_events_and_load_from_frame(shard_id, frame)
        if frame.HasField("adapters"):
            parts.append(convert.adapters_from_proto(shard_id, frame.adapters))
        if step is not None:
            parts.append(StepArrived(shard_id, step))
        if parts:
            self._driver.dispatch(parts[0] if len(parts) == 1 else FrameArrived(shard_id, parts))

    def _is_steady(self, frame: shard_service_pb2.ShardServiceConnectResponse) -> bool:
        """Returns True when the frame is routine: its KV events follow without a gap, and it has no snapshot, no
        adapters and no draining."""
        expected = self._next_kv_number
        if frame.more_kv_events or frame.HasField("kv_snapshot"):
            self._next_kv_number = None
            return False
        if frame.HasField("kv_events"):
            number = frame.kv_events.number
            self._next_kv_number = number + 1
            if number != expected:
                return False
        load = frame.load
        return not (load.draining or load.hand_over or frame.HasField("adapters"))

    async def _write_frames(self, writer: FrameWriter[Any], call: ConnectCall) -> None:
        try:
            await writer.run()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # The reader sees the same break.
        except Exception:
            log.exception("shard_write_failed", shard_id=self.record.shard_id)
        call.cancel()  # The reader then ends the connection, whatever the cause.

    def _wake_writer(self) -> None:
        if self._writer is not None:
            self._writer.wake()

    def _take_frame(self) -> shard_service_pb2.ShardServiceConnectRequest | None:
        """Returns what waits as one frame, or None when nothing does. Submits beyond MAX_FRAME_BYTES wait for the
        next frame."""
        if not (self._submits or self._cancels or self._want_kv_snapshot):
            return None
        num_submits = num_bytes = 0
        for attempt in self._submits:
            num_submits += 1
            num_bytes += BYTES_PER_ID * len(attempt.request.prompt_token_ids)
            if attempt.request.images:
                num_bytes += convert.num_image_bytes(attempt.request)
            if num_bytes >= MAX_FRAME_BYTES:
                break
        taken, self._submits = self._submits[:num_submits], self._submits[num_submits:]
        # A cancel must not overtake the submit it is for.
        cancels: dict[int, int | None] = {}
        if self._submits:
            self._wake_writer()
        else:
            cancels, self._cancels = self._cancels, {}
        want_kv_snapshot, self._want_kv_snapshot = self._want_kv_snapshot, False
        return shard_service_pb2.ShardServiceConnectRequest(
            submits=[convert.submit_to_proto(attempt, packs_token_ids=self._packs_token_ids) for attempt in taken],
            cancel_slots=cancels.keys(),
            discarded_sequences=[
                shard_service_pb2.DiscardedSequence(slot=slot, num_output_tokens=count)
                for slot, count in cancels.items()
                if count is not None
            ],
            want_kv_snapshot=want_kv_snapshot,
        )
