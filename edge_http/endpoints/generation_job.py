"""A request that generates, whatever the API that it came by."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from aiohttp import web

from edge_http.answers.carried_output import CarriedOutput
from edge_http.answers.shape import ResponseShape
from edge_http.endpoints.moderating import WantedModeration
from edge_http.endpoints.objectives import TimedJob
from edge_http.openai.prompt import PromptInput
from edge_http.openai.prompt_report import PromptReport
from edge_http.openai.responses.left_summaries import LeftTurns
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions


class GenerationJob(TimedJob):
    """A validated and tokenized request, whatever the API that it came by."""

    operation: str
    """The operation's OpenTelemetry name: "chat" or "text_completion"."""
    id_prefix: str
    """The response's id begins with it, e.g. "chatcmpl-"."""
    prompts: Sequence[PromptInput]
    prompt_sizes: Sequence[int]
    """The tokens of each prompt."""
    max_tokens_field: str
    stream: bool
    include_usage: bool
    body_digest: str
    shape: ResponseShape
    headers: Mapping[str, str] = {}
    """Further headers of the response."""
    guide_field: str = ""
    """The field of the body that requested guided decoding; "" when none did."""
    prompt_report: PromptReport | None = None
    """The part of its prompt that the answer repeats; None: nothing."""
    response_id: str = ""
    """That of an answer that is there already; ""."""
    service_tier: str = ""
    keep: Callable[[bytes, Sequence[int]], Coroutine[Any, Any, None]] | None = None
    """Stores the JSON of the response and the tokens of its output, before its client is told that it has ended. Raises
    KvloomError. None: it is not stored."""
    begin: Callable[[], Coroutine[Any, Any, web.StreamResponse]] | None = None
    """Has the response generated in the background, and answers with what there is of it. Raises KvloomError. None: it
    is generated here."""
    rewrite: Callable[[bytes], bytes] | None = None
    """Makes the body out of that of the response. None: it is that."""
    carried: CarriedOutput | None = None
    """The beginning of its output, which another request has generated. None: there is none."""
    unsummed: LeftTurns | None = None
    """The turns that it leaves out, and of which there is no summary yet. None: there are none, or nothing sums up."""
    has_summary: bool = False
    """Its prompt has a summary, and so does not follow from the conversation alone."""
    moderation: WantedModeration | None = None
    originals: Mapping[str, str] = {}
    """Texts that are hidden from the model, by their placeholders."""

    @property
    def n(self) -> int:
        """The number of choices of each prompt."""
        return self.wanted.n

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are sampled."""
        return self.wanted.sampling

    def take_default_seed(self) -> None:
        """Use the seed of the model's defaults, if it has one and the request names none."""
        defaults = self.model.default_sampling
        if defaults is not None and defaults.HasField("seed") and not self.sampling.HasField("seed"):
            self.sampling.seed = defaults.seed

    @property
    def stop(self) -> StopConditions:
        """When its choices end."""
        return self.wanted.stop

    @property
    def num_choices(self) -> int:
        """The number of choices of all prompts together."""
        return len(self.prompts) * self.wanted.n
