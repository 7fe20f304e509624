"""A shard without an engine, over real gRPC: token p of an answer is a fixed function of the prompt and p.

Any shard therefore continues an answer exactly as another would have, and a test can check by content that nothing was
lost or mixed up. One task makes a step every `step_seconds`; `pause` suspends it and `resume` continues it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import grpc

from kvloom.v1 import generation_pb2, kv_event_pb2, shard_service_pb2, shard_service_pb2_grpc
from kvloom.v1.shard_service_pb2 import ShardServiceConnectResponse as Frame

VOCABULARY = 1000


def expected_tokens(prompt: Sequence[int], index: int, count: int) -> list[int]:
    """Returns the tokens that every fake shard generates."""
    first = expected_token(prompt, index, 0)
    return [(first + 7 * position) % VOCABULARY for position in range(count)]


def expected_token(prompt: Sequence[int], index: int, position: int) -> int:
    return (sum(prompt) + 31 * index + 7 * position) % VOCABULARY


def token_text(token_id: int) -> str:
    return f"t{token_id} "


def expected_text(prompt: Sequence[int], index: int, count: int) -> str:
    return "".join(map(token_text, expected_tokens(prompt, index, count)))


@dataclasses.dataclass
class _Sequence:
    submit: shard_service_pb2.ShardSubmit
    index: int
    num_tokens: int
    """The number of tokens generated so far, including those of earlier attempts."""
    first: bool = True


class FakeShard(shard_service_pb2_grpc.ShardServiceServicer):
    def __init__(
        self,
        shard_id: str,
        *,
        model: str,
        step_seconds: float = 0.001,
        max_batch: int = 256,
        max_model_len: int = 4096,
        incarnation_id: str = "1",
        tokenizer_checksum: str = "",
        script: Sequence[tuple[int, str]] = (),
        as_sent: Callable[[Frame], Frame] = lambda frame: frame,
    ) -> None:
        """With a `script`, every answer consists of its tokens (id and text) and then stops. `as_sent` may change each
        frame before it is written."""
        self.script = script
        self._as_sent = as_sent
        self.info = shard_service_pb2.ShardInfo(
            shard_id=shard_id,
            incarnation_id=incarnation_id,
            model=model,
            engine="fake",
            block_size=16,
            num_blocks=100_000,
            max_batch=max_batch,
            max_model_len=max_model_len,
            capabilities=["seeded_resume", "logprobs"],
            tokenizer_checksum=tokenizer_checksum,
        )
        self.submits: list[shard_service_pb2.ShardSubmit] = []
        self.cancelled_slots: list[int] = []
        self.num_streams = 0
        self.num_connects = 0
        self.num_asked = 0
        self.address = ""
        self._step_seconds = step_seconds
        self._running: dict[int, _Sequence] = {}
        self._finishes: list[generation_pb2.SequenceFinish] = []
        self._has_work = asyncio.Event()
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_tokens_each(self) -> int:
        """How many tokens every running answer has at least."""
        return min((sequence.num_tokens for sequence in self._running.values()), default=0)

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> str:
        shard_service_pb2_grpc.add_ShardServiceServicer_to_server(self, self._server)
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:{port}')}"
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """Stops at once, so that running streams break."""
        await self._server.stop(0)

    def pause(self) -> None:
        self._may_step.clear()

    def resume(self) -> None:
        self._may_step.set()

    async def GetInfo(self, request, context) -> shard_service_pb2.GetInfoResponse:
        self.num_asked += 1
        return shard_service_pb2.GetInfoResponse(info=self.info)

    async def Connect(self, request_iterator, context) -> None:
        first = await context.read()
        assert first.hello.router_id
        self.num_streams += 1
        self.num_connects += 1
        stepper: asyncio.Task[None] | None = None
        try:  # the router may cancel as soon as it has read the hello
            hello = Frame(
                hello=shard_service_pb2.ShardHello(info=self.info),
                kv_snapshot=kv_event_pb2.KvSnapshot(number=0),
                load=self._load(),
            )
            await context.write(self._as_sent(hello))
            stepper = asyncio.create_task(self._make_steps(context))
            while isinstance(frame := await context.read(), shard_service_pb2.ShardServiceConnectRequest):
                self._on_frame(frame)
        finally:
            # This comes before any await because this task may be cancelled once more.
            self._running.clear()
            self.num_streams -= 1
            if stepper is not None:
                stepper.cancel()
                await asyncio.gather(stepper, return_exceptions=True)

    def _on_frame(self, frame: shard_service_pb2.ShardServiceConnectRequest) -> None:
        for submit in frame.submits:
            self.submits.append(submit)
            for choice in submit.choices:
                assert choice.slot not in self._running, "slot in use"
                self._running[choice.slot] = _Sequence(submit, choice.index, len(choice.output_token_ids))
        for slot in frame.cancel_slots:
            self.cancelled_slots.append(slot)
            sequence = self._running.pop(slot, None)
            if sequence is not None:
                self._finishes.append(self._finish(slot, sequence, generation_pb2.FINISH_REASON_CANCELLED))
        self._has_work.set()

    async def _make_steps(self, context) -> None:
        while True:
            await self._has_work.wait()
            await self._may_step.wait()
            await asyncio.sleep(self._step_seconds)  # sleep: what a step takes
            step = self._step()
            await context.write(self._as_sent(Frame(step=step, load=self._load())))
            if not self._running and not self._finishes:
                self._has_work.clear()

    def _step(self) -> generation_pb2.StepFrame:
        frame = generation_pb2.StepFrame(finishes=self._finishes)
        self._finishes = []
        for slot, sequence in list(self._running.items()):
            submit = sequence.submit
            if sequence.first:
                sequence.first = False
                frame.starts.add(slot=slot, num_cached_tokens=0)
            if self.script:
                self._play(frame, slot, sequence)
                continue
            token_id = expected_token(submit.prompt_token_ids, sequence.index, sequence.num_tokens)
            sequence.num_tokens += 1
            frame.slots.append(slot)
            frame.token_ids.append(token_id)
            frame.deltas.append(token_text(token_id))
            if submit.sampling.HasField("logprobs"):
                frame.logprobs.add(slot=slot, logprob=-float(token_id))
            if sequence.num_tokens >= submit.stop.max_tokens:
                del self._running[slot]
                frame.finishes.append(self._finish(slot, sequence, generation_pb2.FINISH_REASON_LENGTH))
        return frame

    def _play(self, frame: generation_pb2.StepFrame, slot: int, sequence: _Sequence) -> None:
        if sequence.num_tokens < len(self.script):
            token_id, text = self.script[sequence.num_tokens]
            frame.slots.append(slot)
            frame.token_ids.append(token_id)
            frame.deltas.append(text)
            sequence.num_tokens += 1
        if sequence.num_tokens >= len(self.script):
            del self._running[slot]
            frame.finishes.append(self._finish(slot, sequence, generation_pb2.FINISH_REASON_STOP))

    def _finish(self, slot: int, sequence: _Sequence, reason) -> generation_pb2.SequenceFinish:
        return generation_pb2.SequenceFinish(
            slot=slot,
            reason=reason,
            num_prompt_tokens=len(sequence.submit.prompt_token_ids),
            num_output_tokens=sequence.num_tokens,
        )

    def _load(self) -> shard_service_pb2.LoadReport:
        return shard_service_pb2.LoadReport(
            num_running=len(self._running),
            num_available_blocks=self.info.num_blocks,
            num_blocks=self.info.num_blocks,
            prefill_tokens_per_second=10_000.0,
            decode_step_seconds=self._step_seconds,
        )
