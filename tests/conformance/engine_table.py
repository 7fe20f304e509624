"""The table engine x capability of docs/concepts/engines.md: `python -m tests.conformance.engine_table` rewrites it.

It says what engines said of themselves once they had started; the suite's tests of a capability run where it is listed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from kvloom_common.config import ShardConfig, SimConfig, TensorRtLlmConfig, TorchConfig
from shard_server.engines.base import Capability, Engine
from shard_server.engines.sim_engine import SimEngine
from shard_server.engines.tensorrt_llm.engine import TensorRtLlmEngine
from shard_server.engines.torch_engine.checkpoint.converted_model import ensure_builtin_model
from shard_server.engines.torch_engine.engine import TorchEngine
from tests.conformance.embedding_suite import EmbeddingSuite
from tests.conformance.engine_suite import EngineSuite
from tests.fakes.fake_tensorrt_llm import installed_tensorrt_llm
from tests.fakes.tiny_bert import write_tiny_bert

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "engines.md"
BEGIN = "<!-- written by python -m tests.conformance.engine_table -->"
END = "<!-- end of what is written -->"


def engines(model_dir: Path, encoder_dir: Path) -> Mapping[str, Callable[[], Engine]]:
    """The engines, by the heading of their column."""

    def torch(model_dir: Path = model_dir, **fields: object) -> Callable[[], Engine]:
        torch_config = TorchConfig(num_threads=1, **fields)
        # What a start computes to be warm follows from the last of these; the capabilities do not.
        config = ShardConfig(torch=torch_config, num_blocks=64, max_prefill_tokens_per_step=16)
        return lambda: TorchEngine(model_dir, "model", config)

    def tensorrt_llm(**options: object) -> Callable[[], Engine]:
        config = ShardConfig(engine="tensorrt_llm", tensorrt_llm=TensorRtLlmConfig(options=options))
        return lambda: TensorRtLlmEngine(
            Path("model"), "model", config, vocab_size=49152, eos_token_ids=frozenset({2}), max_model_len=4096
        )

    sim = ShardConfig(engine="sim", sim=SimConfig(step_ms=0, sees_images=True))
    return {
        "torch": torch(),
        "torch, int8 weights": torch(weights="int8"),
        "torch, not deterministic": torch(deterministic=False),
        "torch, encoder": torch(encoder_dir),
        "tensorrt_llm": tensorrt_llm(),
        "tensorrt_llm, guided": tensorrt_llm(guided_decoding_backend="xgrammar"),
        "tensorrt_llm, C++ sampler": tensorrt_llm(sampler_type="TRTLLMSampler"),
        "sim": lambda: SimEngine("model", sim, vocab_size=49152, eos_token_ids=frozenset({2})),
    }


async def capabilities(model_dir: Path) -> dict[str, frozenset[Capability]]:
    """The capabilities of each started engine; TensorRT-LLM's adapter runs over the fake library."""
    found: dict[str, frozenset[Capability]] = {}
    with installed_tensorrt_llm(), tempfile.TemporaryDirectory() as folder:
        encoder_dir = write_tiny_bert(Path(folder), pooling="mean_tokens")
        for name, make in engines(model_dir, encoder_dir).items():
            engine = make()
            try:
                await engine.start()
                found[name] = engine.info.capabilities
            finally:
                await engine.close()
    return found


def table(found: Mapping[str, frozenset[Capability]]) -> str:
    """The table in Markdown."""
    suites = [EngineSuite if Capability.GENERATE in own else EmbeddingSuite for own in found.values()]
    num_tests = [sum(name.startswith("test_") for name in dir(suite)) for suite in suites]
    lines = [f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    lines.append(f"| tests of the suite | {' | '.join(map(str, num_tests))} |")
    for capability in Capability:
        marks = ("yes" if capability in own else "no" for own in found.values())
        lines.append(f"| `{capability.value}` | {' | '.join(marks)} |")
    return "\n".join(lines)


def split_page(page: str) -> tuple[str, str, str]:
    """Split a page into (before, the table, after). Raises ValueError when the markers are not there."""
    before, rest = page.split(BEGIN)
    written, behind = rest.split(END)
    return before, written.strip("\n"), behind


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(capabilities(ensure_builtin_model(Path(folder))))
    before, _, behind = split_page(PAGE.read_text())
    PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{behind}")


if __name__ == "__main__":
    main()
