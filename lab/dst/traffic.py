"""The clients' requests: what they ask for, when, and what they resume."""

from __future__ import annotations

import random
from collections import deque

import msgspec

from kvloom.adapters import Adapter
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.kv_share import KvShare
from lab.dst import script
from lab.dst.environment import Environment
from lab.dst.nodes.client import ClientStream, ObservedAnswer
from lab.dst.nodes.router_node import RouterNode
from lab.dst.rollouts.sessions import Sessions
from lab.dst.scenario import MODELS
from router.core.events import ChoiceSpec, Request, TierRank
from router.core.objectives import Objectives
from tools.stable_hash import stable_hash

LONGEST_WINDOW = 96


class Traffic:
    def __init__(self, env: Environment, nodes: list[RouterNode], sessions: Sessions | None) -> None:
        """`sessions`: None where there are no rollouts; then a request names its version itself."""
        self._env = env
        self._nodes = nodes
        """The current incarnations; the list belongs to the world."""
        self._sessions = sessions
        self._rng: random.Random = env.rng
        self._tier_rng = random.Random(f"{env.scenario.seed} tier of each")
        self._class_rng = random.Random(f"{env.scenario.seed} class of each")
        self._objectives_rng = random.Random(f"{env.scenario.seed} objectives of each")
        self._has_objectives = self._objectives_rng.random() < 0.25
        self._objectives_since: dict[str, float] = {}
        """When requests with objectives were first sent, by the keys of their scripts."""
        self._model_rng = random.Random(f"{env.scenario.seed} model of each")
        self._adapter_rng = random.Random(f"{env.scenario.seed} adapter of each")
        self.models = sorted({shard.model for shard in env.scenario.shards})
        """Those that are or were served: clients may ask for a model that has been unloaded."""
        self._repeat_rng = random.Random(f"{env.scenario.seed} repeated requests")
        self._latest: deque[Request] = deque(maxlen=8)
        """Requests that may be repeated, also by other tenants. Only with a result cache."""
        shares = env.scenario.kv_shares
        self._kv_shares = {tenant: KvShare(stable_hash(tenant), shares[tenant]) for tenant in shares}
        self._num_streams = 0
        self.num_requests = 0
        self.prompts: dict[tuple[str, str, tuple[int, ...], Adapter | None], None] = {}
        """(model, tenant, prompt, adapter) of every request so far."""
        self.adapters: list[tuple[str, Adapter]] = []
        """Those that shards of a model have, or had: clients may ask for one that is gone."""

    def start(self) -> None:
        self._env.timeline.after(self._rng.expovariate(self._env.scenario.requests_per_second), self._next_request)

    def add_stream(self, router: int) -> ClientStream:
        self._num_streams += 1
        return ClientStream(
            self._env, self._nodes[router], f"client-{self._num_streams}", self._reconnect, self._note_end
        )

    def send_request(self, stream: ClientStream) -> None:
        request = self._draw_request(stream)
        self._submit(stream, request if self._sessions is None else self._sessions.begin(request))

    def send_again(self, stream: ClientStream, request: Request, request_id: str) -> None:
        """Send the same request once more, under an id that is or was in use."""
        specs = [ChoiceSpec(stream.take_slot(), spec.index) for spec in request.choices]
        self._submit(
            stream, msgspec.structs.replace(request, request_id=request_id, client_id=stream.client_id, choices=specs)
        )

    def any_stream(self) -> ClientStream:
        """A stream whose client is connected. A client that leaves is replaced, so that there is one."""
        streams = [s for node in self._nodes for s in node.clients.values() if s.is_open_at_client]
        return self._rng.choice(streams) if streams else self.add_stream(self._rng.randrange(len(self._nodes)))

    def _reconnect(self, stream: ClientStream) -> None:
        """A client whose stream broke connects again and resumes most of its open answers."""
        again = self.add_stream(stream.node.number)
        # Not by id: a rejected duplicate with the same id may be open too.
        by_request: dict[int, list[ObservedAnswer]] = {}
        for answer in stream.open.values():
            by_request.setdefault(answer.request.choices[0].slot, []).append(answer)
        for answers in by_request.values():
            if self._rng.random() < 0.7:
                self._continue(again, answers)

    def _note_end(self, answer: ObservedAnswer) -> None:
        error = None if answer.finish is None else answer.finish.error
        if error is not None and error.reason == ErrorReason.ERROR_REASON_DRAINING:
            self._resume_elsewhere(answer)
        pending = None if self._sessions is None else self._sessions.note_end(answer)
        if self._sessions is not None and pending is not None:
            stream = self.any_stream()
            specs = [ChoiceSpec(stream.take_slot(), spec.index) for spec in answer.request.choices]
            again = msgspec.structs.replace(
                answer.request, request_id=self._new_request_id(), client_id=stream.client_id, choices=specs
            )
            self._submit(stream, self._sessions.pass_on(pending, again))

    def _resume_elsewhere(self, answer: ObservedAnswer) -> None:
        """The answer ended because its router drains. Another router is asked for the rest."""
        if not self._env.is_calm:
            self._continue(self.any_stream(), [answer])

    # -- requests -----------------------------------------------------------------------------------------------------

    def _next_request(self) -> None:
        if self._env.is_calm:
            return
        self.send_request(self.any_stream())
        self.start()

    def _submit(self, stream: ClientStream, request: Request) -> None:
        self.num_requests += 1
        if self._env.limits is not None:
            request = self._env.limits.hostile.claims(stream.node.name, request, stream.take_slot)
        self.prompts[request.model, request.tenant, tuple(request.prompt_token_ids), request.adapter] = None
        stream.submit(request)

    def _continue(self, stream: ClientStream, answers: list[ObservedAnswer]) -> None:
        request = answers[0].request
        self._env.count_fault("client_resumes")
        specs = [
            self._resumed_spec(stream, request, answer.spec.index, answer.num_tokens, answer.num_chars)
            for answer in answers
        ]
        self._submit(
            stream,
            msgspec.structs.replace(
                request,
                request_id=self._new_request_id(),
                client_id=stream.client_id,
                choices=specs,
                is_cacheable=False,  # as the intake decides
                objectives=self._later(request),
            ),
        )

    def _resumed_spec(
        self, stream: ClientStream, request: Request, index: int, num_tokens: int, num_chars: int
    ) -> ChoiceSpec:
        assert isinstance(request.sampling, script.ScriptedSampling)
        tokens = script.answer(request.sampling.script_key, index)[:num_tokens]
        return ChoiceSpec(stream.take_slot(), index, tokens, num_chars)

    def _new_request_id(self) -> str:
        return f"request-{self.num_requests + 1}"

    def _draw_request(self, stream: ClientStream) -> Request:
        rng, env = self._rng, self._env
        name = self._new_request_id()
        tenant = rng.choices(env.scenario.tenants, env.scenario.tenant_weights)[0]
        sampling = script.ScriptedSampling(name, wants_logprobs=rng.random() < 0.2)
        prompt = [
            *[rng.randrange(3)] * rng.randrange(0, 36, 4),
            *(rng.randrange(50) for _ in range(rng.randrange(1, 20))),
        ]
        max_tokens = rng.choice((None, 1, 4, 12, 40))
        if env.chance("impossible_request"):
            prompt, max_tokens = rng.choice(
                (([1] * LONGEST_WINDOW, None), ([], 4), ([1], LONGEST_WINDOW), ([1], 0), ([1] * 80, 15))
            )
        model = MODELS[0]
        if rng.random() < 0.3 and any(shard.model == MODELS[1] for shard in env.scenario.shards):
            model = MODELS[1]
        if len(self.models) > 2 or env.scenario.has_model_changes:
            model = self._model_rng.choice(self.models)
        if env.chance("unknown_model"):
            model = "unknown"
        request = Request(
            request_id=name,
            client_id=stream.client_id,
            model=model,
            prompt_token_ids=prompt,
            prompt_text=script.BLOCKED_WORD if rng.random() < 0.08 else "harmless",
            choices=(),
            max_tokens=max_tokens,
            sampling=sampling,
            timeout_seconds=rng.choice((0.0, 0.0, 0.1, 5.0)),
            tenant=tenant,
            safety_identifier=name,
            cache_salt=tenant,
            kv_share=self._kv_shares.get(tenant),
            tier=TierRank.BATCH if self._tier_rng.random() < env.scenario.batch_share else TierRank.INTERACTIVE,
            adapter=self._draw_adapter(model),
        )
        classes = env.scenario.config.classes
        if classes:
            request = msgspec.structs.replace(
                request, priority_class=self._class_rng.choice(classes), fairness_id=self._class_rng.choice(("", "a"))
            )
        if self._has_objectives and self._objectives_rng.random() < 0.6:
            request = msgspec.structs.replace(request, objectives=self._draw_objectives())
            self._objectives_since[name] = env.timeline.now
        specs = [self._draw_choice(stream, request, index) for index in range(rng.choice((1, 1, 1, 3)))]
        if env.limits is not None:
            request = env.limits.with_key(request)
        request = msgspec.structs.replace(request, choices=specs)
        return self._repeated(stream, request) if env.scenario.has_result_cache else request

    def _repeated(self, stream: ClientStream, request: Request) -> Request:
        """The request, or in its place one that asks for the same as an earlier one, of any tenant."""
        is_new = not any(spec.output_token_ids for spec in request.choices)
        assert isinstance(request.sampling, script.ScriptedSampling)
        if not is_new or request.sampling.wants_logprobs:
            return request
        if not self._latest or self._repeat_rng.random() < 0.4:
            self._latest.append(request)
            return msgspec.structs.replace(request, is_cacheable=True)
        earlier = self._repeat_rng.choice(self._latest)
        specs = [ChoiceSpec(stream.take_slot(), spec.index) for spec in earlier.choices]
        return msgspec.structs.replace(
            earlier,
            request_id=request.request_id,
            client_id=request.client_id,
            tenant=request.tenant,
            choices=specs,
            is_cacheable=True,
        )

    def _draw_objectives(self) -> Objectives:
        choice = self._objectives_rng.choice
        return Objectives(choice((None, 0.2, 2.0)), choice((None, 0.02, 0.2, 1.0)), choice((None, 0.02)))

    def _later(self, request: Request) -> Objectives | None:
        """The objectives of a request that is continued, as a link or the SDK passes them on."""
        if request.objectives is None:
            return None
        assert isinstance(request.sampling, script.ScriptedSampling)
        now = self._env.timeline.now
        # A rollout may have given the request another script than the one it was drawn with.
        elapsed_seconds = now - self._objectives_since.setdefault(request.sampling.script_key, now)
        elapsed_seconds = max(elapsed_seconds, request.objectives.elapsed_seconds)
        return msgspec.structs.replace(request.objectives, elapsed_seconds=elapsed_seconds, is_admitted=True)

    def _draw_adapter(self, model: str) -> Adapter | None:
        """Mostly one of the latest."""
        known = [adapter for other, adapter in self.adapters if other == model][-4:]
        return self._adapter_rng.choice(known) if known and self._adapter_rng.random() < 0.6 else None

    def _draw_choice(self, stream: ClientStream, request: Request, index: int) -> ChoiceSpec:
        """Now and then, a choice that resumes an answer of another stream."""
        if not self._env.chance("resumed_request"):
            return ChoiceSpec(stream.take_slot(), index)
        assert isinstance(request.sampling, script.ScriptedSampling)
        tokens = script.answer(request.sampling.script_key, index)
        most = min(len(tokens), request.max_tokens or len(tokens))
        count = most if self._rng.random() < 0.3 else self._rng.randint(1, most)
        text = script.text_shown(tokens, count, is_final=self._rng.random() < 0.5)
        return self._resumed_spec(stream, request, index, count, len(text))
