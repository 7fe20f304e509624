"""An encoder with the arithmetic that it computes with. It is small, and computes in float32 unless told otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from kvloom_common.config import TorchConfig
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.arithmetic import DTYPES
from shard_server.engines.torch_engine.checkpoint.sentence_config import load_sentence_config
from shard_server.engines.torch_engine.checkpoint.weights import OnProgress
from shard_server.engines.torch_engine.encoder.config import load_encoder_config
from shard_server.engines.torch_engine.encoder.model import EncoderModel
from shard_server.engines.torch_engine.encoder.weights import expected_shapes, load_encoder_weights
from shard_server.engines.torch_engine.memory import available_memory_bytes
from shard_server.engines.torch_engine.operators.linear import INVARIANT_ROWS, TorchLinears, common_row_granularity

_OVERHEAD_BYTES: Final = 128 * 2**20
_PROBED_SIZES: Final = (19, 1, 40, 64)
"""The numbers of tokens of the texts by which a batch is compared with its texts alone."""


class EncoderRunner:
    """A model, and the threads that compute. Used from one thread at a time."""

    def __init__(
        self,
        model_dir: Path,
        config: TorchConfig,
        *,
        max_model_len: int,
        num_threads: int,
        device: torch.device,
        on_progress: OnProgress = lambda _message: None,
    ) -> None:
        """Loads the weights. 0 for `max_model_len` means the longest text that the model was trained for. Raises
        EngineError."""
        _check_options(config)
        torch.set_num_threads(num_threads)
        encoder = load_encoder_config(model_dir)
        sentence = load_sentence_config(model_dir)
        self.vocab_size, self.hidden_size = encoder.vocab_size, encoder.hidden_size
        self.is_sentence_model = sentence.is_sentence_model
        self.default_pooling = sentence.pooling
        self.max_model_len = max_model_len or min(sentence.max_tokens or encoder.max_tokens, encoder.max_tokens)
        if self.max_model_len > encoder.max_tokens:
            raise EngineError(f"max_model_len is {max_model_len}, more than the {encoder.max_tokens} of {model_dir}")
        dtype = torch.float32 if config.dtype == "auto" else DTYPES[config.dtype]
        num_bytes = sum(math.prod(shape) for shape in expected_shapes(encoder).values()) * dtype.itemsize
        if device.type == "cpu" and num_bytes + _OVERHEAD_BYTES > available_memory_bytes():
            raise EngineError(f"too little memory: the weights need {num_bytes / 2**30:.2f} GiB")
        is_invariant = config.deterministic and device.type == "cpu"
        with torch.inference_mode():
            self._model = EncoderModel(
                encoder,
                load_encoder_weights(model_dir, encoder, on_progress),
                dtype=dtype,
                linears=TorchLinears(INVARIANT_ROWS if is_invariant else None),
                device=device,
            )
            granularity = common_row_granularity(self._model.distinct_products, dtype) if is_invariant else None
        self._row_granularity = granularity or 1
        self.batch_invariant = granularity is not None and self._is_invariant()
        """True when a text's vector does not depend on the batch, bit for bit: measured on this machine at the
        start."""
        where = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
        name = str(dtype).removeprefix("torch.")
        self.variant = f"{name}/torch-{where}"
        self.description = f"encoder with torch's operators ({where}), {name}, {torch.get_num_threads()} threads"

    @torch.inference_mode()
    def run(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """For each text, given as token ids, the hidden states of its tokens: float32 [tokens, hidden_size]."""
        sizes = [len(text) for text in texts]
        num_padding = -sum(sizes) % self._row_granularity
        return list(self._model.forward(texts, num_padding).cpu().split(sizes))

    def _is_invariant(self) -> bool:
        generator = torch.Generator().manual_seed(0)
        sizes = [min(size, self.max_model_len) for size in _PROBED_SIZES]
        texts = [torch.randint(0, self.vocab_size, (size,), generator=generator).tolist() for size in sizes]
        together = self.run(texts)
        alone = [self.run([text])[0] for text in texts]
        return all(map(torch.equal, together, alone))


def _check_options(config: TorchConfig) -> None:
    if config.weights == "int8":
        raise EngineError("weights = 'int8' is not supported for encoders: leave it at 'auto'")
    if config.kernels not in ("auto", "torch"):
        raise EngineError(f"kernels = {config.kernels!r} is not supported for encoders: leave it at 'auto'")
