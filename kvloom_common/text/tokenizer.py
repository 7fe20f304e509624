"""A model's tokenizer: it turns text into ids off the event loop, ids into exact bytes, and conversations into
prompts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from tokenizers import Tokenizer

from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.text.token_ids import token_array
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.limits.fair_threads import FairThreads
from kvloom_common.process.cpu_affinity import use_every_cpu
from kvloom_common.text.chat_template import ChatMessage, ChatTemplate, message_variables, named_tokens, read_json
from kvloom_common.text.prompt_images import PromptImages
from kvloom_common.text.public_pieces import without_own_cache
from kvloom_common.text.special_tokens import AliasedEncoder, SpecialStrings, texts_in, with_texts
from kvloom_common.text.token_bytes import TokenBytes
from kvloom_common.text.tokenization_cache import MIN_PIECEWISE_CHARS, TextEncoding
from kvloom_common.text.tokenization_caches import TokenizationCaches

__all__ = ["ChatMessage", "ModelTokenizer"]

T = TypeVar("T")

_MAX_MESSAGE_CHARS: Final = 500
ENCODE_THREADS: Final = 2
MAX_PENDING_ENCODES: Final = 1024
MAX_PENDING_OF_SCOPE: Final = MAX_PENDING_ENCODES // 4
"""One caller may have so many pending, so that the others find room."""
TURN_CHARS: Final = 32 * 1024
"""How much of a long text is encoded in one turn: some milliseconds. Then it is another caller's turn."""
MAX_INLINE_CHARS: Final = 1024
"""A text of up to this size is encoded on the event loop, which blocks it for about 0.2 ms. Encoding takes about 0.2 µs
per character, and the thread pool adds 0.1 ms."""
MAX_INLINE_MISSES: Final = 32
"""At most this many words are encoded on the event loop."""
NUM_PLAIN_VARIABLES: Final = 2
"""Role and content: the variables of a message without tool calls."""
MAX_ONE_BY_ONE: Final = 32
"""More pieces than this are encoded as a batch."""


class ModelTokenizer:
    """The tokenizer of one model; each process makes one. Thread-safe, except for `encode` and `encode_chat`, which
    must be called on the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = without_own_cache(tokenizer)
        self._template = template
        self._eos_token_ids = eos_token_ids
        self._vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self._special_strings = SpecialStrings(token.content for token in added.values() if token.special)
        self._token_bytes = TokenBytes(tokenizer)
        self._aliased: AliasedEncoder | None = None
        self._aliased_lock = threading.Lock()
        self._threads = FairThreads[str | None](ENCODE_THREADS, "tokenizer", use_every_cpu)
        self._num_pending = 0
        self._adds_tokens = bool(tokenizer.encode("", add_special_tokens=True).ids)
        self._caches = TokenizationCaches(tokenizer)
        self._has_learned = False

    @classmethod
    def load(cls, model_dir: Path) -> ModelTokenizer:
        """Load from a directory with tokenizer.json and, optionally, tokenizer_config.json, chat_template.jinja,
        generation_config.json and config.json. Raises ValueError that names the file which cannot be used."""
        path = model_dir / "tokenizer.json"
        with _naming(path):
            tokenizer = Tokenizer.from_file(str(path))
        template = ChatTemplate.load(model_dir)
        eos_token_ids = _eos_token_ids(model_dir, tokenizer)
        with _naming(path):
            loaded = cls(tokenizer, template=template, eos_token_ids=eos_token_ids)
            len(loaded.token_texts)  # builds the tables now, not on the event loop during the first request
        return loaded

    @property
    def vocab_size(self) -> int:
        """The number of ids, including added tokens: all ids are below it."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self._eos_token_ids

    @property
    def token_texts(self) -> Sequence[str | None]:
        """By id: the text that a token adds; None where its bytes are not whole characters, "" for special tokens."""
        return self._token_bytes.texts

    def release_caches(self) -> None:
        """Free the memory of texts that were tokenized before. Call this on the event loop."""
        self._caches.clear()

    @property
    def special_tokens(self) -> Sequence[str]:
        """The strings that the tokenizer parses as special tokens."""
        return self._special_strings.strings

    def special_token_ids(self, strings: Iterable[str]) -> list[int]:
        """The ids of those of the strings that are special tokens."""
        known = frozenset(self._special_strings.strings)
        ids = [self._tokenizer.token_to_id(text) for text in strings if text in known]
        return sorted({token_id for token_id in ids if token_id is not None})

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt text of a conversation. Raises KvloomError (INVALID_ARGUMENT)."""
        return self._required_template().render(messages)

    @property
    def template(self) -> ChatTemplate | None:
        """None for a model without a chat template."""
        return self._template

    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise invalid_argument("This model has no chat template: send a text prompt instead.", "messages")
        return self._template

    async def encode(self, text: str, *, scope: str | None = None, add_special_tokens: bool = False) -> array[int]:
        """The ids of `text`, in which special-token strings become special tokens. `scope`: the callers that may find
        out by the time it takes that the text was encoded before; None: no text is remembered. Raises KvloomError
        (INVALID_ARGUMENT, QUEUE_FULL)."""
        if len(text) < MIN_PIECEWISE_CHARS or (add_special_tokens and self._adds_tokens):
            if len(text) <= MAX_INLINE_CHARS:
                return token_array(self.encode_now(text, add_special_tokens=add_special_tokens))
            encode = self.encode_now
            return token_array(
                await self._in_thread(scope, lambda: encode(text, add_special_tokens=add_special_tokens))
            )
        if not self._has_learned:
            self._has_learned = True
            with contextlib.suppress(RuntimeError):  # it is closed, but still used by requests that have begun
                self._threads.submit(None, self._caches.learn)
        cache = self._caches.of(scope)
        encoding = TextEncoding(cache)
        for _ in cache.fill(encoding, text):
            await asyncio.sleep(0)
        if encoding.misses:
            await self._encode_misses(encoding, scope)
        for _ in encoding.join():
            await asyncio.sleep(0)
        if encoding.is_new:
            self._caches.fit()
        return encoding.joined()

    async def _encode_misses(self, encoding: TextEncoding, scope: str | None) -> None:
        misses = list(encoding.misses)
        if encoding.num_missing_chars <= MAX_INLINE_CHARS and len(misses) <= MAX_INLINE_MISSES:
            encoding.take(misses, self._encode_pieces(misses))
            return
        for pieces in _turns(misses):
            encoding.take(pieces, await self._in_thread(scope, functools.partial(self._encode_pieces, pieces)))

    def _encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        encode = self._tokenizer.encode_batch_fast
        try:
            if len(pieces) <= MAX_ONE_BY_ONE:  # for a batch the library would wake its own threads
                return [encode([piece], add_special_tokens=False)[0].ids for piece in pieces]
            return [encoding.ids for encoding in encode(pieces, add_special_tokens=False)]
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates
            raise invalid_argument("The text is not valid Unicode.") from error

    def encode_now(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Like `encode`, in the calling thread. The GIL is released meanwhile."""
        try:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates
            raise invalid_argument("The text is not valid Unicode.") from error

    async def encode_pair(self, first: str, second: str, *, scope: str | None = None) -> array[int]:
        """The ids of two texts that are one prompt, with the special tokens around and between them, for a model that
        compares them. Raises KvloomError (INVALID_ARGUMENT, QUEUE_FULL)."""

        def encode() -> list[int]:
            try:
                return self._tokenizer.encode_batch_fast([(first, second)], add_special_tokens=True)[0].ids
            except (UnicodeEncodeError, TypeError) as error:  # lone surrogates
                raise invalid_argument("The text is not valid Unicode.") from error

        is_short = len(first) + len(second) <= MAX_INLINE_CHARS
        return token_array(encode() if is_short else await self._in_thread(scope, encode))

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        is_continued: bool = False,
        *,
        scope: str | None = None,
        images: PromptImages | None = None,
    ) -> tuple[array[int], str]:
        """The (ids, text) of a conversation's prompt. `tools`: as the template expects them; `options`: further
        variables of the template; `is_continued`: the last message is the beginning of the answer; `scope`: as for
        `encode`; `images`: those of which the messages have marks. Special-token strings in whatever a user can write
        stay plain text (see kvloom_common/text/special_tokens.py). Raises KvloomError (INVALID_ARGUMENT,
        UNSUPPORTED_PARAMETER, QUEUE_FULL)."""
        template = self._required_template()
        variables = message_variables(messages)
        if tools or max(map(len, variables), default=0) > NUM_PLAIN_VARIABLES:
            (variables, tools), mark = self._marked_everywhere((variables, list(tools)))
        else:
            contents, mark = self._special_strings.mark([message.content for message in messages])
            if mark:
                for message, content in zip(variables, contents, strict=True):
                    message["content"] = content
        if is_continued:
            text = continued_prompt(template, variables, tools, options)
        else:
            text = template.render_variables(variables, tools, options)
        if images is not None:
            texts, marks = images.split(text)
            encoded = [await self._chat_ids(each, mark, scope) for each in texts]
            return images.joined(encoded, marks), images.without_marks(text.replace(mark, "") if mark else text)
        if not mark:
            return await self.encode(text, scope=scope), text
        return await self._chat_ids(text, mark, scope), text.replace(mark, "")

    async def _chat_ids(self, text: str, mark: str, scope: str | None) -> array[int]:
        if not mark:
            return await self.encode(text, scope=scope)
        ids = await self._in_thread(scope, lambda: self._aliased_encoder().encode(text, mark))
        return token_array(ids)

    def _marked_everywhere(self, value: Any) -> tuple[Any, str]:
        """The JSON value with the special-token strings in all its texts broken up, and the mark that does it."""
        texts = texts_in(value)
        marked, mark = self._special_strings.mark(texts)
        return (with_texts(value, iter(marked)) if mark else value), mark

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Bytes that are not UTF-8 become U+FFFD."""
        table = self._token_bytes
        if table.are_words:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        get = table.shown if skip_special_tokens else table.exact
        return b"".join(map(get, ids)).decode("utf-8", errors="replace")

    async def decode_fairly(
        self, ids: Sequence[int], *, scope: str | None = None, skip_special_tokens: bool = True
    ) -> str:
        """Decodes as `decode` does, in a thread, when it is the scope's turn. Raises KvloomError (QUEUE_FULL)."""
        return await self._in_thread(scope, lambda: self.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token represents; for a special token, its name. b"" for ids that the tokenizer does
        not know (models pad their vocabulary)."""
        return self._token_bytes.exact(token_id)

    def shown_bytes(self, token_id: int) -> bytes:
        """Like `token_bytes`, but b"" for special tokens, whose names are never shown."""
        return self._token_bytes.shown(token_id)

    def close(self) -> None:
        """End the threads after the work that is running. Calling it again is safe."""
        self._threads.shutdown()

    async def _in_thread(self, scope: str | None, work: Callable[[], T]) -> T:
        """In a thread, when it is the scope's turn. Raises KvloomError (QUEUE_FULL)."""
        is_flood = self._threads.num_waiting(scope) >= MAX_PENDING_OF_SCOPE
        if is_flood or self._num_pending >= MAX_PENDING_ENCODES:
            raise KvloomError(
                ErrorReason.ERROR_REASON_QUEUE_FULL,
                "Too many prompts are waiting to be tokenized.",
                retry_after_seconds=1,
            )
        self._num_pending += 1
        try:
            return await asyncio.wrap_future(self._threads.submit(scope, work))
        finally:
            self._num_pending -= 1

    def _aliased_encoder(self) -> AliasedEncoder:
        with self._aliased_lock:
            if self._aliased is None:
                self._aliased = AliasedEncoder(self._tokenizer, self._special_strings)
            return self._aliased


def _turns(pieces: Sequence[str]) -> Iterator[Sequence[str]]:
    """The pieces, as many at a time as one turn takes. A single piece may be longer: it cannot be cut."""
    begin = num_chars = 0
    for end, piece in enumerate(pieces):
        if num_chars and num_chars + len(piece) > TURN_CHARS:
            yield pieces[begin:end]
            begin, num_chars = end, 0
        num_chars += len(piece)
    yield pieces[begin:]


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raises ValueError that names the file, for whatever goes wrong with it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the library raises plain Exception, and panics, which are none
        raise ValueError(f"{path}: {str(error)[:_MAX_MESSAGE_CHARS]}") from error


def _eos_token_ids(model_dir: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """generation_config.json has precedence over config.json. The tokenizer's own eos_token is always included."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value: Any = read_json(model_dir / name).get("eos_token_id")
        if value is not None:
            token_ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token_id, int) for token_id in token_ids):
                raise ValueError(f"{model_dir / name}: eos_token_id must be an integer or a list of integers.")
            found.update(token_ids)
            break
    eos_token = named_tokens(read_json(model_dir / "tokenizer_config.json")).get("eos_token")
    eos_id = tokenizer.token_to_id(eos_token) if eos_token else None
    if eos_id is not None:
        found.add(eos_id)
    return frozenset(found)


_END: Final = "\uf8ffend of the last message\uf8ff"
"""Stands behind the last message while it is rendered, so that what the template adds behind it can be cut off."""


def continued_prompt(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """The prompt up to the end of the last message's content. Raises KvloomError (INVALID_ARGUMENT,
    UNSUPPORTED_PARAMETER)."""
    *others, last = messages
    content = last["content"]
    marked = [*others, {**last, "content": content + _END}]
    text = template.render_variables(marked, tools, options, add_generation_prompt=False)
    prompt, _, _ = text.partition(_END)
    if text.count(_END) != 1 or not prompt.endswith(content.lstrip()):
        raise unsupported(
            "messages: this model's chat template cannot leave the assistant's last message open to be continued. Let "
            "the last message be the user's.",
            "messages",
        )
    return prompt
