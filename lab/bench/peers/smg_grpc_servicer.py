"""An engine for smg's gRPC mode that costs as little as possible: `python smg_grpc_servicer.py ORDER_FILE PORT`.

It runs in smg's own virtualenv, so this file imports only the standard library, grpcio and smg's protocol. Like the
HTTP workers (mock_worker.py) it has one clock: all streams get their tokens in the same steps, one message per token,
with stamps as tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as messages
from smg_grpc_proto import vllm_engine_pb2_grpc as service


class EngineSteps:
    """The engine's steps, which run while a stream waits for one."""

    def __init__(self, step_ms: float) -> None:
        self._step_seconds = step_ms / 1e3
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[None] | None = None
        self._next_at = 0.0

    async def wait(self, num_steps: int) -> None:
        """Wait for the end of so many steps."""
        for _ in range(num_steps):
            if not self._step_seconds:
                await asyncio.sleep(0)
                continue
            if self._next is None:
                self._next = self._loop.create_future()
                self._next_at = max(self._next_at + self._step_seconds, self._loop.time())
                self._loop.call_at(self._next_at, self._end_step)
            # A stream that is cancelled must not cancel the step of the others.
            await asyncio.shield(self._next)

    def _end_step(self) -> None:
        ended, self._next = self._next, None
        if ended is not None:
            ended.set_result(None)


class SmgEngineServicer(service.VllmEngineServicer):
    """The calls that smg makes; all others are answered UNIMPLEMENTED."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._steps = EngineSteps(order["step_ms"])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        order, asked_at = self._order, time.monotonic()
        num_tokens = request.sampling_params.max_tokens or 16
        num_prompt = len(request.tokenized.input_ids)
        output_ids: list[int] = []
        for number in range(num_tokens):
            await self._steps.wait(order["decode_every"] if number else 1)
            now = time.monotonic()
            token_id = self._stamp(now if number else now - asked_at)
            output_ids.append(token_id)
            yield messages.GenerateResponse(
                chunk=messages.GenerateStreamChunk(
                    token_ids=(token_id,), prompt_tokens=num_prompt, completion_tokens=number + 1
                )
            )
        yield messages.GenerateResponse(
            complete=messages.GenerateComplete(
                output_ids=output_ids, finish_reason="length", prompt_tokens=num_prompt, completion_tokens=num_tokens
            )
        )

    def _stamp(self, seconds: float) -> int:
        stamps = self._order["stamp_token_ids"]
        return stamps[int(seconds / self._order["tick_seconds"]) % len(stamps)]

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return messages.HealthCheckResponse(healthy=True, message="serving")

    async def Abort(self, request: Any, context: Any) -> Any:
        return messages.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        order = self._order
        return messages.GetModelInfoResponse(
            model_path=order["model_path"], tokenizer_path=order["model_path"], served_model_name=order["model"],
            is_generation=True, model_type="llama", architectures=("LlamaForCausalLM",),
            vocab_size=order["vocab_size"], eos_token_ids=order["eos_token_ids"],
            max_context_length=131_072, max_req_input_len=131_072,
        )  # fmt: skip

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return messages.GetServerInfoResponse(
            server_type="vllm-grpc", data_parallel_size=1, block_size=16, max_num_seqs=4096
        )


async def serve(order: dict[str, Any], port: int) -> None:
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 64 << 20),))
    service.add_VllmEngineServicer_to_server(SmgEngineServicer(order), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    with open(sys.argv[1]) as order_file:
        asyncio.run(serve(json.load(order_file), int(sys.argv[2])))
