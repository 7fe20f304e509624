"""Collects the actions of one handled event: at most one SendStep per client and one ScreenAnswers."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.actions import Action, AnswerScope, CancelOnShard, ScreenAnswers, SendStep
from router.core.frames import Step
from router.core.live import Choice, StreamClient


class ActionBuffer:
    """The actions of the event that is being handled."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self.clients: list[StreamClient] = []
        """Clients to which this event sends something."""
        self._cancels: dict[str, tuple[list[int], list[int]]] = {}
        self.screen_slots: list[int] = []
        self.screen_deltas: list[str] = []
        self.close_slots: list[int] = []
        self.screen_skips: list[tuple[int, int, str]] = []
        self.screen_scopes: list[AnswerScope] = []

    def add(self, action: Action) -> None:
        self._actions.append(action)

    def cancel(self, choice: Choice) -> None:
        """Cancel the choice on the shard that runs it."""
        slots, num_output_tokens = self._cancels.setdefault(choice.shard_id, ([], []))
        slots.append(choice.shard_slot)
        num_output_tokens.append(len(choice.output_token_ids))

    def drop_cancels(self, shard_id: str) -> None:
        """The connection is gone, and its sequences with it. In the next one, their slots belong to others."""
        self._cancels.pop(shard_id, None)

    def step(self, client: StreamClient) -> Step:
        """The step that this event sends to `client`."""
        step = client.step
        if step is None:
            step = client.step = Step()
            self.clients.append(client)
        return step

    def drop_client(self, client: StreamClient) -> None:
        """The client is gone: nothing is sent to it."""
        if client.step is not None:
            client.step = None
            self.clients.remove(client)

    def add_tokens(self, choice: Choice, token_ids: Sequence[int], delta: str, logprobs: Sequence[object]) -> None:
        """Append one entry. `num_tokens` stays shorter than `slots` while entries have one token each; `take` fills it
        up."""
        step = self.step(choice.client)
        count = len(token_ids)
        if count != 1:
            step.num_tokens.extend([1] * (len(step.slots) - len(step.num_tokens)))
            step.num_tokens.append(count)
        step.slots.append(choice.client_slot)
        step.token_ids.extend(token_ids)
        step.deltas.append(delta)
        for entry in logprobs:
            step.logprobs.append((choice.client_slot, entry))

    def take(self) -> list[Action]:
        """All actions since the last call."""
        actions = self._actions
        if self._cancels:
            actions.extend(CancelOnShard(shard_id, *cancels) for shard_id, cancels in self._cancels.items())
            self._cancels = {}
        if self.clients:
            for client in self.clients:
                step = client.step
                assert step is not None
                client.step = None
                if step.num_tokens:
                    step.num_tokens.extend([1] * (len(step.slots) - len(step.num_tokens)))
                if step:
                    actions.append(SendStep(client.client_id, step))
            self.clients = []
        if self.screen_slots or self.close_slots:
            skips, scopes = self.screen_skips, self.screen_scopes
            actions.append(ScreenAnswers(self.screen_slots, self.screen_deltas, self.close_slots, skips, scopes))
            self.screen_slots, self.screen_deltas, self.close_slots = [], [], []
            self.screen_skips, self.screen_scopes = [], []
        self._actions = []
        return actions
