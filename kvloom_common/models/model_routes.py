"""Finds the model that takes a request: by the route that its `model` names, by the fallbacks that it lists, and by the
rollouts of new versions. It is pure: shares are drawn by a stable hash, so that a session stays with its model, on
every edge and router."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec
import xxhash

from kvloom.errors import invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import CascadeConfig, ConfigError, RouteConfig, RouteRule, RouteTarget
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.models.languages import language_of

AUTO: Final = "auto"
"""Stands for any model, unless a route or a model has this name."""
MAX_CANDIDATES: Final = 8
"""How many models are tried for one request."""

BYTES_PER_TOKEN: Final = 4
"""The usual size of a token in a body. Before a model is chosen, there is no tokenizer to count with."""

Feature = Literal["tools", "schema", "logprobs", "vision"]

FALLBACK_REASONS: Final = frozenset(
    (
        ErrorReason.ERROR_REASON_MODEL_NOT_FOUND,
        ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
        ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER,
        ErrorReason.ERROR_REASON_QUEUE_FULL,
        ErrorReason.ERROR_REASON_NO_SHARD_READY,
        ErrorReason.ERROR_REASON_QUEUE_TIMEOUT,
        ErrorReason.ERROR_REASON_DEADLINE_IMPOSSIBLE,
        ErrorReason.ERROR_REASON_OVERLOADED,
        ErrorReason.ERROR_REASON_BROWNOUT,
        ErrorReason.ERROR_REASON_SHARD_LOST,
        ErrorReason.ERROR_REASON_ENGINE_FAILED,
    )
)
"""The errors after which another model may take the request. The others would be the same there, or concern the
caller."""


@dataclasses.dataclass(frozen=True, slots=True)
class RouteFacts:
    """The facts on which rules and shares depend."""

    num_prompt_tokens: int
    """An estimate."""
    features: frozenset[Feature]
    is_batch: bool
    share_key: str
    """Requests with the same key go to the same share."""
    max_answer_tokens: int = 0
    """The most that the answer may have; 0: no limit was given."""
    user_text: str = ""
    """The last message of the user. It may be left out if no rule reads it."""
    is_answer: bool = True
    """True when text is generated. Rollouts share such requests only: the others go to the version that has the model's
    name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cascade:
    """That of a route."""

    route: str
    """Its name."""
    tests: CascadeConfig


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenRoute:
    """The models to try, best first, each once."""

    models: Sequence[str]
    start: str
    """How the first was chosen, for people: the name, and the rule that held (`chat;rule=2`)."""
    targets: Sequence[str] = ()
    """The first of the route's models, if one was named, and the version of the first model, if it is shared."""
    rule: RouteRule | None = None
    """The one that held."""
    cascades: Mapping[str, Cascade] = dataclasses.field(default_factory=dict)
    """By model: the cascade that judges its answer before the client gets it. The others' answers are not judged, and
    the last one's never is."""
    continued: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By model: the route, by its name, whose next model continues an answer that this model has begun and lost."""

    def successors(self, model: str) -> Sequence[str]:
        """The models that may continue an answer that this one has lost, best first: those that the same route tries
        after it. So each is tried once, whatever is lost."""
        route = self.continued.get(model)
        if route is None:
            return ()
        later = self.models[self.models.index(model) + 1 :]
        return [other for other in later if self.continued.get(other) == route]

    @property
    def how(self) -> str:
        """`auto;rule=2;target=small`"""
        return self.start + "".join(f";target={target}" for target in self.targets)

    @property
    def conditions(self) -> str:
        """Those of the rule that held, as in the configuration: `features tools, languages de/fr`; "" if none did."""
        given = {} if self.rule is None else msgspec.structs.asdict(self.rule)
        shown = {name: value for name, value in given.items() if value and name != "targets"}
        return ", ".join(
            f"{name} {'/'.join(value) if isinstance(value, list) else value}" for name, value in shown.items()
        )


class ModelRoutes:
    """The configured routes of a fabric, and its rollouts and unloads, which come and go while the process runs."""

    def __init__(self, routes: Sequence[RouteConfig] = ()) -> None:
        """Raises ConfigError if two routes have one name."""
        self._configured: Mapping[str, RouteConfig] = {route.name: route for route in routes}
        self._shares: Mapping[str, RouteConfig] = {}
        """How the requests for a model that is being replaced are shared, by each of its names."""
        self._new_versions: frozenset[str] = frozenset()
        self._successors: Mapping[str, RouteConfig] = {}
        """The models that take the requests for those that are being unloaded, by each of their names."""
        self.by_name: Mapping[str, RouteConfig] = self._configured
        """All of them. A configured route leads to models, to whose shares its requests then come as well."""
        self._unshared: Mapping[str, RouteConfig] = self._configured
        """Those of requests for embeddings, which rollouts do not share."""
        if len(self._configured) != len(routes):
            twice = next(name for name in self._configured if sum(route.name == name for route in routes) > 1)
            raise ConfigError(f"routes: two have the name {twice!r}")
        for route in routes:
            _check_targets(route, self._configured)
            _check_next_model(route)
        self.reads_text = any(rule.languages for route in routes for rule in route.rules)
        """True when some rule depends on what the user wrote."""

    def follow_rollouts(self, rollouts: Iterable[RolloutRecord]) -> None:
        """From now on these are all that there are. What was shared by others before is no longer."""
        shares: dict[str, RouteConfig] = {}
        new_versions: set[str] = set()
        for rollout in rollouts:
            new_versions.add(rollout.new)
            shares.update(dict.fromkeys(rollout.names, _shares_of(rollout)))
        self._shares, self._new_versions = shares, frozenset(new_versions)
        self._index()

    def follow_successors(self, successors: Mapping[str, str]) -> None:
        """From now on these names of models that are being unloaded stand for the models that succeed them, whatever
        this process knows of a rollout: it may have missed the last step."""
        found = {name: RouteConfig(name=name, targets=[model]) for name, model in successors.items()}
        if found != self._successors:
            self._successors = found
            self._index()

    def _index(self) -> None:
        self._unshared = {**self._successors, **self._configured}
        self.by_name = {**self._shares, **self._unshared}

    def is_needed(
        self, name: str, more: Sequence[str] | None, served: Container[str], *, is_answer: bool = True
    ) -> bool:
        """True when `name` is a route, or there are fallbacks. `is_answer`: see RouteFacts."""
        routes = self.by_name if is_answer else self._unshared
        return bool(more) or name in routes or self.is_any(name, served)

    def check_comparable(
        self, name: str, more: Sequence[str], served: Collection[str], resolved: Callable[[str], str]
    ) -> None:
        """Embeddings of different models cannot be compared, so that a route must lead to one model. A list of several
        is the client's own choice. `served` are the models that "auto" stands for; `resolved` gives the model of an
        alias. Raises KvloomError (INVALID_ARGUMENT) that names the field of an HTTP body."""
        for field, wanted in (("model", name), *((f"models[{i}]", each) for i, each in enumerate(more))):
            route = self._configured.get(wanted)
            found: Iterable[str] = (wanted,)
            if route is not None:
                found = models_of(route)
            elif wanted == AUTO and AUTO not in served:
                found = served
            models = sorted(set(map(resolved, found)))
            if len(models) > 1:
                raise invalid_argument(
                    f"{wanted!r} leads to several models ({', '.join(models[:MAX_CANDIDATES])}), and their embeddings "
                    "cannot be compared: name one of them, or list those that may answer in models.",
                    field,
                )

    def is_any(self, name: str, served: Container[str]) -> bool:
        """True when `name` stands for all models."""
        return name == AUTO and name not in self.by_name and name not in served

    def choose(self, name: str, more: Sequence[str], facts: RouteFacts, served: Iterable[str]) -> ChosenRoute:
        """The models for a request that names `name` and, as fallbacks, `more`: models or routes. `served` are all
        models, which "auto" stands for if it is neither a route nor a model."""
        models: dict[str, None] = {}
        cascades: dict[str, Cascade] = {}
        continued: dict[str, str] = {}
        starts: list[tuple[str, Sequence[str], RouteRule | None]] = []
        for wanted in (name, *more):
            route = self._configured.get(wanted)
            rule = None
            if route is None and wanted == AUTO and AUTO not in (names := sorted(served)):
                found, start, targets = [name for name in names if name not in self._new_versions], AUTO, []
            elif route is None:
                found, start, targets = [wanted], wanted, []
            else:
                number, weighted = _targets(route, facts)
                rule = route.rules[number - 1] if number else None
                first = _drawn(route.name, weighted, facts.share_key)
                found = list(dict.fromkeys((first, *route.fallback)))
                start, targets = f"{wanted}{f';rule={number}' * bool(number)}", [first]
            versions = [self._versions(model, facts) for model in found]
            if versions and versions[0][0] != found[0]:
                targets.append(versions[0][0])
            if route is not None and route.cascade is not None:
                last = versions[-1]
                judged = [version for one in versions for version in one if version not in last]
                cascade = Cascade(route.name, route.cascade)
                cascades |= {version: cascade for version in judged if version not in models}
            if route is not None and route.on_loss == "continue":
                own = [version for one in versions for version in one if version not in models]
                continued |= dict.fromkeys(own, route.name)
            models.update(dict.fromkeys(version for one in versions for version in one))
            starts.append((start, targets, rule))
        tried = list(models)[:MAX_CANDIDATES]
        for model in tried[-1:]:
            cascades.pop(model, None)
        return ChosenRoute(tried, *starts[0], cascades, continued)

    def _versions(self, model: str, facts: RouteFacts) -> Sequence[str]:
        """The version of a model that this key gets, and the one to fall back to: the old one, whose requests a new one
        never gets."""
        shares = self._shares if facts.is_answer else {}
        route = self._successors.get(model) or shares.get(model)
        if route is None:
            return (model,)
        return (_drawn(route.name, [_target(target) for target in route.targets], facts.share_key), *route.fallback)


NO_ROUTES: Final = ModelRoutes()


def models_of(route: RouteConfig) -> Sequence[str]:
    """All models that the route may choose, each once."""
    targets = [*route.targets, *(target for rule in route.rules for target in rule.targets)]
    return list(dict.fromkeys([_target(target).model for target in targets] + route.fallback))


def _shares_of(rollout: RolloutRecord) -> RouteConfig:
    """The new version is the last target, so that while its share grows, keys only move to it. Its requests may fall
    back to the old one, also when it has all of them: those of a process that hears late of a rollback."""
    old = [RouteTarget(model=rollout.old, weight=1 - rollout.share)] if rollout.share < 1 else []
    new = [RouteTarget(model=rollout.new, weight=rollout.share)] if rollout.share > 0 else []
    return RouteConfig(name=rollout.name, targets=[*old, *new], fallback=[rollout.old])


def _check_targets(route: RouteConfig, routes: Mapping[str, RouteConfig]) -> None:
    """A target that is another route could lead in a circle. One of the route's own name is the model of that name."""
    for model in models_of(route):
        if model in routes and model != route.name:
            raise ConfigError(f"routes: {route.name!r} has the target {model!r}, which is a route: name a model")


def _check_next_model(route: RouteConfig) -> None:
    """A cascade, and answers that continue, need another model."""
    if len(models_of(route)) == 1:
        for setting, is_set in (("a cascade", route.cascade is not None), ("on_loss", route.on_loss != "fail")):
            if is_set:
                raise ConfigError(f"routes: {route.name!r} has {setting} and one model: name the next in fallback")


def _target(target: str | RouteTarget) -> RouteTarget:
    return RouteTarget(model=target) if isinstance(target, str) else target


def _targets(route: RouteConfig, facts: RouteFacts) -> tuple[int, Sequence[RouteTarget]]:
    """The number of the rule that decides (from 1; 0: none), and its targets."""
    for number, rule in enumerate(route.rules, 1):
        if _holds(rule, facts):
            return number, [_target(target) for target in rule.targets]
    return 0, [_target(target) for target in route.targets]


def _holds(rule: RouteRule, facts: RouteFacts) -> bool:
    num_context_tokens = facts.num_prompt_tokens + facts.max_answer_tokens
    return (
        facts.features.issuperset(rule.features)
        and (not rule.tiers or ("batch" if facts.is_batch else "interactive") in rule.tiers)
        and facts.num_prompt_tokens >= rule.min_prompt_tokens
        and (not rule.max_prompt_tokens or facts.num_prompt_tokens <= rule.max_prompt_tokens)
        and num_context_tokens >= rule.min_context_tokens
        and (not rule.max_context_tokens or num_context_tokens <= rule.max_context_tokens)
        and (not rule.languages or language_of(facts.user_text) in rule.languages)
    )


def _drawn(route: str, targets: Sequence[RouteTarget], key: str) -> str:
    """The target in whose part of [0, 1) the key's hash lies. If the last one's weight grows, keys only move to it."""
    if len(targets) == 1:
        return targets[0].model
    position = xxhash.xxh3_64_intdigest(f"{route}\0{key}".encode()) / 2**64 * sum(target.weight for target in targets)
    for target in targets[:-1]:
        position -= target.weight
        if position < 0:
            return target.model
    return targets[-1].model
