"""`kvloom chat`: a conversation with a model in the terminal, through the Python SDK."""

from __future__ import annotations

import asyncio
import sys
import time

import click

from kvloom.client.client import Client
from kvloom.client.generate_request import GenerateOptions
from kvloom.client.generation import Delta
from kvloom.errors import KvloomError
from kvloom.text.chat_message import ChatMessage
from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart
from kvloom_common.process.cancellation import raise_if_cancelled
from tools.cli.router_client import RouterFlags, Routers, client_options, first_model
from tools.failures import CommandError
from tools.options import option

HELP_LINE = "Type a message. Ctrl-C stops an answer, /new starts a new conversation, Ctrl-D quits."
INTERRUPTED_STATUS = 130


@click.command()
@click.argument("prompt", required=False)
@option("--model", scope="chat", help="The name of a served model.  [default: the first one]")
@option("--system", scope="chat", help="The system prompt.")
@option("--max-tokens", scope="chat", type=click.IntRange(min=1), help="The largest number of tokens of an answer.")
@option(
    "--temperature",
    scope="chat",
    type=click.FloatRange(0, 2),
    help="The sampling temperature. 0 is greedy.  [default: 1]",
)
@option(
    "--seed", scope="chat", type=click.IntRange(0, 2**64 - 1), help="The seed. The same seed gives the same answer."
)
@client_options
def chat(
    prompt: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    reach: RouterFlags,
) -> None:
    """Stream the answer to PROMPT, or hold a conversation if there is no PROMPT.

    The answer is printed to stdout. The time to first token, the speed, the shard and the cached tokens are printed to
    stderr.
    """
    routers = reach.routers()
    with asyncio.Runner() as runner:
        client = runner.run(_connect(routers))
        try:
            options = GenerateOptions(model=model or runner.run(first_model(client)))
            if max_tokens is not None:
                options["max_tokens"] = max_tokens
            if temperature is not None:
                options["temperature"] = temperature
            if seed is not None:
                options["seed"] = seed
            conversation = Conversation(runner, client, options, system)
            if prompt is None:
                _converse(conversation)
            elif conversation.ask(prompt):
                raise SystemExit(INTERRUPTED_STATUS)
        except KvloomError as error:
            raise CommandError(error.message) from error
        finally:
            runner.run(client.close())


class Conversation:
    """The messages of a conversation. Each question is sent with all earlier messages."""

    def __init__(self, runner: asyncio.Runner, client: Client, options: GenerateOptions, system: str | None) -> None:
        self._runner = runner
        self._client = client
        self._options = options
        self._system = [ChatMessage("system", system)] if system else []
        self._messages: list[ChatMessage] = []

    def forget(self) -> None:
        self._messages.clear()

    def ask(self, prompt: str) -> bool:
        """Stream the answer to stdout. Returns True if a Ctrl-C stopped it; the text up to then counts as the answer.
        Raises KvloomError, and then forgets the prompt."""
        question = ChatMessage("user", prompt)
        answer = ChatAnswer()
        interrupted = False
        try:
            self._runner.run(self._stream(question, answer))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            # End the line of a broken answer too, so that the next output starts on a new line.
            print(flush=True)
        print(answer.summary(interrupted), file=sys.stderr, flush=True)
        self._messages += [question, ChatMessage("assistant", answer.text)]
        return interrupted

    async def _stream(self, question: ChatMessage, answer: ChatAnswer) -> None:
        options = self._options.copy()
        options["messages"] = [*self._system, *self._messages, question]
        deltas = self._client.generate(**options)
        try:
            async for delta in deltas:
                answer.add(delta)
                print(delta.text, end="", flush=True)
                raise_if_cancelled()  # Ctrl-C
        finally:
            # End the request at the router at once, not when the generator is collected.
            await deltas.aclose()


class ChatAnswer:
    """One answer as it arrives, and its figures."""

    def __init__(self) -> None:
        self.text = ""
        self._asked = time.perf_counter()
        self._first: float | None = None
        self._last = self._asked
        self._num_tokens = 0
        self._start: SequenceStart | None = None
        self._finish: SequenceFinish | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        if delta.token_ids:
            self._last = time.perf_counter()
            self._first = self._first or self._last
            self._num_tokens += len(delta.token_ids)
        self._start = delta.start or self._start
        self._finish = delta.finish or self._finish

    def summary(self, interrupted: bool) -> str:
        parts = ["stopped"] if interrupted else []
        if self._first is not None:
            parts.append(f"first token after {1000 * (self._first - self._asked):.0f} ms")
            parts.append(f"{self._num_tokens} tokens")
        if self._first is not None and self._last > self._first:
            parts.append(f"{(self._num_tokens - 1) / (self._last - self._first):.1f} tokens/s")
        if self._start is not None:
            parts.append(self._start.shard_id)
        if self._finish is not None:
            parts.append(f"{self._finish.num_cached_tokens} of {self._finish.num_prompt_tokens} prompt tokens cached")
        return f"[{', '.join(parts)}]"


def _converse(conversation: Conversation) -> None:
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        # Importing readline gives input() line editing and history.
        import readline  # noqa: F401

        print(HELP_LINE, file=sys.stderr)
    while True:
        try:
            prompt = input("> " if at_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return
        if prompt == "/new":
            conversation.forget()
        elif prompt:
            try:
                conversation.ask(prompt)
            except KvloomError as error:
                print(f"error: {error.message}", file=sys.stderr)


async def _connect(routers: Routers) -> Client:
    addresses = routers.own_addresses or [routers.any_address]
    return await Client(addresses, client_id="chat", open_channel=routers.open_channel).__aenter__()
