"""An engine that plays the model of a coding agent (scripted_agent.py) in a shard of a real fabric.

It is a plugin, as the fabric of run_agents.py finds it; `shard.plugin` names the folder of the agent's session, and the
file that tells what the model has seen. Timing and blocks are those of the simulated engine.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import Capability, EngineInfo, EngineRequest
from shard_server.engines.create import EngineSetup
from shard_server.engines.sim_engine import SimEngine
from shard_server.engines.sim_sequence import SimSequence
from tests.clients.scripted_agent import ScriptedAgent

NAME: Final = "scripted"
ENTRY: Final = f"[kvloom.engines]\n{NAME} = tests.clients.scripted_engine:ScriptedEngine\n"
_CAPABILITIES: Final = frozenset({Capability.GENERATE, Capability.PREFIX_CACHING})


class ScriptedEngine(SimEngine):
    """Answers a prompt with what the agent's model says to it."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup.model_name, setup.shard, setup.vocab_size, setup.eos_token_ids, setup.max_model_len)
        self._tokenizer = ModelTokenizer.load(setup.model_dir)
        self._agent = ScriptedAgent(Path(setup.settings["folder"]))
        self._state_file = Path(setup.settings["state_file"])
        self._answers: dict[str, list[int]] = {}
        """The tokens of each request's answer."""

    @property
    def info(self) -> EngineInfo:
        return dataclasses.replace(super().info, capabilities=_CAPABILITIES)

    def submit(self, request: EngineRequest) -> None:
        said = self._agent.reply(self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False))
        self._state_file.write_text(json.dumps(self._agent.state()))
        tokens = self._tokenizer.encode_now(said.text)
        if said.is_cut_off:
            request = dataclasses.replace(request, max_tokens=min(request.max_tokens, len(tokens)))
        self._answers[request.request_id] = [*tokens, *sorted(self.info.eos_token_ids)[:1]]
        super().submit(request)

    def _chosen_token(self, sequence: SimSequence) -> int | None:
        tokens = self._answers[sequence.request.request_id]
        return tokens[min(sequence.num_output_tokens, len(tokens) - 1)]
