"""The safety service and its streams to the routers. It may be slow, and it may go down."""

from __future__ import annotations

from lab.dst.checker import Violation
from lab.dst.environment import Environment
from lab.dst.nodes.pipe import Pipe
from lab.dst.script import BLOCKED_WORD, HALTED_TOKEN
from lab.dst.views import RouterProcess
from router.core.actions import CheckPrompt, ScreenAnswers
from router.core.events import AnswerHalt, AnswersScreened, PromptVerdict, SafetyDown, SafetyUp

HOLD_BACK_CHARS = 3
JUDGE_SECONDS = 0.003


class SimSafety:
    def __init__(self, env: Environment) -> None:
        self._env = env
        self.is_up = True
        self.slowness = 1.0
        self.screens_prompts = env.rng.random() < 0.8
        self.screens_answers = env.rng.random() < 0.8
        self.streams: list[SimulatedSafetyStream] = []

    def bring_up(self) -> None:
        self.is_up = True

    def restore_speed(self) -> None:
        self.slowness = 1.0

    def stop(self) -> None:
        self.is_up = False
        for stream in self.streams:
            stream.break_off()
        self.streams = []

    def change_policy(self) -> None:
        """The policy file was reloaded. Every router is notified, and the policy applies to later requests."""
        rng = self._env.rng
        self.screens_prompts, self.screens_answers = rng.random() < 0.7, rng.random() < 0.7
        for stream in self.streams:
            stream.send_policy()


class SimulatedSafetyStream:
    def __init__(self, env: Environment, node: RouterProcess, safety: SimSafety) -> None:
        self._env = env
        self._node = node
        self._safety = safety
        latency = env.scenario.latency_seconds
        self._to_safety = Pipe(env.timeline, env.rng, self._arrive_at_safety, latency)
        self._to_router = Pipe(env.timeline, env.rng, self._arrive_at_router, latency)
        self._is_open = True
        self.is_announced = False
        self._frames: list[ScreenAnswers] = []
        self._is_judging = False
        self._texts: dict[int, str | None] = {}
        """The text so far by slot. None means halted: further text is dropped until the slot is closed."""
        self._skipped: dict[int, tuple[int, str]] = {}
        """By slot, how many characters an earlier stream has cleared, and the last of them."""
        self._checks: set[int] = set()

    # -- the router's end ---------------------------------------------------------------------------------------------

    def send(self, message: CheckPrompt | ScreenAnswers) -> None:
        self._to_safety.send(message)

    def break_off(self) -> None:
        self._to_safety.cut()
        self._to_router.cut()
        self._env.timeline.after(self._env.rng.random() * 0.03, self._node.post, self._lost_at_router)

    def close(self) -> None:
        """The router's process has died."""
        self._is_open = False
        self._to_safety.cut()
        self._to_router.cut()
        if self in self._safety.streams:
            self._safety.streams.remove(self)

    def send_policy(self) -> None:
        self._to_router.send(SafetyUp(self._safety.screens_prompts, self._safety.screens_answers))

    def _lost_at_router(self) -> None:
        if self._is_open:
            self._is_open = False
            self._node.safety = None
            if self.is_announced:
                self._node.handle(SafetyDown())
            self._node.reconnect_safety()

    def _arrive_at_router(self, event: SafetyUp | PromptVerdict | AnswersScreened) -> None:
        self._node.post(self._take_event, event)

    def _take_event(self, event: SafetyUp | PromptVerdict | AnswersScreened) -> None:
        if self._is_open:
            self.is_announced = True
            self._node.handle(event)
            self._node.check_integrity()

    # -- the service's end --------------------------------------------------------------------------------------------

    def _arrive_at_safety(self, message: CheckPrompt | ScreenAnswers) -> None:
        if isinstance(message, CheckPrompt):
            if message.check_id in self._checks:
                raise Violation("safety_protocol", f"check {message.check_id} was asked for while it is open")
            self._checks.add(message.check_id)
            # Prompts are judged concurrently with answers, so that a slow verdict may be overtaken.
            self._env.timeline.after(self._judge_seconds(), self._judge_prompt, message)
            return
        if len(set(message.slots)) != len(message.slots):
            raise Violation("safety_protocol", "a frame has more than one entry for an answer")
        self._frames.append(message)
        if not self._is_judging:
            self._is_judging = True
            self._env.timeline.after(self._judge_seconds(), self._judge_answers)

    def _judge_seconds(self) -> float:
        return JUDGE_SECONDS * self._safety.slowness * self._env.rng.expovariate(1.0)

    def _judge_prompt(self, check: CheckPrompt) -> None:
        self._checks.discard(check.check_id)
        self._to_router.send(PromptVerdict(check.check_id, BLOCKED_WORD not in check.text, "blocked prompt"))

    def _judge_answers(self) -> None:
        self._is_judging = False
        frames, self._frames = self._frames, []
        for frame in frames:
            self._to_router.send(self._judge_frame(frame))

    def _judge_frame(self, frame: ScreenAnswers) -> AnswersScreened:
        slots: list[int] = []
        clear: list[int] = []
        halts: list[AnswerHalt] = []
        for slot, num_chars, last_char in frame.skips:
            if slot in self._texts:
                raise Violation("safety_protocol", f"text was skipped in the middle of slot {slot}")
            self._skipped[slot] = (num_chars, last_char)
        for slot, delta in zip(frame.slots, frame.deltas, strict=True):
            num_skipped, last_char = self._skipped.get(slot, (0, " "))
            text = self._texts.setdefault(slot, "")
            if text is None:
                continue
            text += delta
            halt_at = f"{last_char}{text}".find(f" {HALTED_TOKEN} ")
            self._texts[slot] = None if halt_at >= 0 else text
            if halt_at >= 0:
                halts.append(AnswerHalt(slot, num_skipped + halt_at, "halted answer"))
            else:
                slots.append(slot)
                clear.append(num_skipped + max(0, len(text) - HOLD_BACK_CHARS))
        for slot in frame.close_slots:
            if slot not in self._texts:
                raise Violation("safety_protocol", f"slot {slot} was closed without having been opened")
            del self._texts[slot]
            self._skipped.pop(slot, None)
        return AnswersScreened(slots, clear, halts, frame.close_slots)
