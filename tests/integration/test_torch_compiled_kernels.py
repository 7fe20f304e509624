"""Nobody waits for a compiler: kernels are compiled before an engine is ready, once per machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import ShardConfig, TorchConfig
from lab.shallow_model import write_shallow_model
from shard_server.engines.base import Guide, GuideKind, Pooling, Sampling
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.conformance.engine_driver import EngineDriver, prompt_of, request_of
from tests.fakes.kernel_threads import runnable_family_names
from tests.fakes.peft_adapter import write_peft_adapter

SCHEMA = json.dumps({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
COUNT_COMPILATIONS = """
import sys
from numba.core.event import install_recorder
from shard_server.engines.torch_engine.kernels.families import FAMILIES
from shard_server.engines.torch_engine.kernels.program import entry_point
with install_recorder("numba:compile") as recorder:
    entry_point(FAMILIES[sys.argv[1]])
sys.stdout.write(str(len(recorder.buffer)))
"""


async def test_no_request_waits_for_a_compiler(model_dir: Path, tmp_path: Path) -> None:
    """Whatever requests ask for: lengths, a cached prefix, log-probabilities, penalties, guides, embeddings, adapters,
    predictions, alone and together. Each was once the first of its kind on a machine, and compiling takes seconds."""
    event: Any = pytest.importorskip("numba.core.event")
    path = write_shallow_model(model_dir, tmp_path / "model", num_layers=2)
    adapter = write_peft_adapter(path, tmp_path / "adapter", rank=8, seed=1)
    config = ShardConfig(torch=TorchConfig(num_threads=1), num_blocks=256)
    engine = TorchEngine(path, "model", config, max_loaded_adapters=2)
    try:
        await engine.start()
        driver = EngineDriver(engine)
        await engine.adapters.add("own", str(adapter), load_now=True)
        with event.install_recorder("numba:compile") as recorder:
            for number, length in enumerate((1, 5, 64, 300, 700)):
                await driver.run(request_of(f"length {length}", prompt_of(number, length), 3))
            await driver.run(request_of("prefix", [*prompt_of(4, 700), 7, 8, 9], 3))
            samplings = [
                Sampling(temperature=0.0, num_logprobs=3, num_prompt_logprobs=2),
                Sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, seed=1),
                Sampling(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias=((9, 2.0),)),
            ]
            mixed = [
                request_of(f"sampling {number}", prompt_of(number, 40), 8, sampling=sampling)
                for number, sampling in enumerate(samplings)
            ]
            mixed.append(request_of("guide", prompt_of(9, 20), 12, guide=Guide(GuideKind.JSON_SCHEMA, SCHEMA)))
            mixed.append(request_of("adapter", prompt_of(10, 50), 8, adapter="own"))
            mixed.append(request_of("prediction", prompt_of(11, 50), 8, predicted_token_ids=prompt_of(12, 8)))
            engine.submit(request_of("vector", prompt_of(13, 50), 0, pooling=Pooling()))
            await driver.run(*mixed)
            await driver.step_until(lambda: "vector" in driver.ends)
        assert [str(one) for _, one in recorder.buffer] == []
    finally:
        await engine.close()


@pytest.mark.long
@pytest.mark.parametrize("family", runnable_family_names()[:1])
def test_a_start_loads_what_an_earlier_one_has_compiled(family: str) -> None:
    """In a process of its own, as a shard that starts again is."""
    counts = [
        int(
            subprocess.run(
                (sys.executable, "-c", COUNT_COMPILATIONS, family), check=True, capture_output=True, timeout=300
            ).stdout
        )
        for _ in range(2)
    ]
    assert counts[1] == 0
