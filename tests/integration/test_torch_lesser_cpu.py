"""An engine that is to compute with what its CPU lacks refuses to start, and says what to do instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.tiny_llama import write_tiny_llama

cpu = pytest.importorskip("shard_server.engines.torch_engine.kernels.codegen.cpu")

AVX2_ONLY = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}
LOAD = """
import sys
from pathlib import Path
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.model_runner import ModelRunner

for options in ({"weights": "int8", "kernels": "torch"}, {"kernels": "avx512"}, {"kernels": "avx512_bf16"}):
    sizes = {"dtype": "bfloat16", "block_size": 16, "num_blocks": 8, "max_model_len": 64, "num_threads": 1}
    try:
        ModelRunner(Path(sys.argv[1]), **sizes, **options)
    except EngineError as error:
        print(error)
"""


@pytest.mark.skipif(cpu.is_arm64(), reason="these are CPUs of the x86 kind")
def test_a_cpu_with_avx2_alone_refuses_what_it_cannot_compute(tmp_path: Path) -> None:
    """On such a CPU, and on others that play one: its 8-bit products overflow, and it has no AVX-512."""
    done = subprocess.run(
        (sys.executable, "-c", LOAD, str(write_tiny_llama(tmp_path, head_dim=64))),
        env={**os.environ, **AVX2_ONLY},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "int8 weights are not supported here: this CPU's int8 products are not exact; "
        "set shard.torch.kernels to auto, or shard.torch.weights to dtype",
        "kernels 'avx512' cannot run here; set shard.torch.kernels to auto",
        "kernels 'avx512_bf16' cannot run here; set shard.torch.kernels to auto",
    ]
