"""An encoder with the arithmetic that it computes with: compiled kernels, with bf16 or 8-bit weights, whichever are
faster on this machine; where those cannot run, torch's operators, in float32 unless told otherwise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvloom_common.config import TorchConfig
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.arithmetic import DTYPES, ArithmeticChoice, compiled_threads
from shard_server.engines.torch_engine.checkpoint.sentence_config import load_sentence_config
from shard_server.engines.torch_engine.checkpoint.weights import OnProgress, load_tensors
from shard_server.engines.torch_engine.encoder.config import EncoderConfig, load_encoder_config
from shard_server.engines.torch_engine.encoder.model import EncoderModel
from shard_server.engines.torch_engine.memory import available_memory_bytes
from shard_server.engines.torch_engine.operators.linear import INVARIANT_ROWS, TorchLinears, common_row_granularity
from shard_server.engines.torch_engine.weight_form import WeightForm

if TYPE_CHECKING:
    from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool


_OVERHEAD_BYTES: Final = 128 * 2**20
_PROBED_SIZES: Final = (19, 1, 40, 64)
"""The numbers of tokens of the texts by which a batch is compared with its texts alone."""


class _Computes(NamedTuple):
    """Holds what computes, and what it is called."""

    forward: Callable[[Sequence[Sequence[int]]], torch.Tensor]
    may_be_invariant: bool
    variant: str
    description: str


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
        threads = _compiled_threads(encoder, config, device, on_progress)
        dtype = torch.float32 if config.dtype == "auto" or threads is not None else DTYPES[config.dtype]
        num_bytes = sum(math.prod(shape) for shape in expected_shapes(encoder).values()) * dtype.itemsize
        if device.type == "cpu" and num_bytes + _OVERHEAD_BYTES > available_memory_bytes():
            raise EngineError(f"too little memory: the weights need {num_bytes / 2**30:.2f} GiB")
        weights = load_encoder_weights(model_dir, encoder, on_progress)
        self.score_head = ScoreHead(weights) if encoder.is_cross_encoder else None
        """That of a cross-encoder; None: the model gives embeddings."""
        if threads is not None:
            computes = _compiled(encoder, weights, config, threads, on_progress)
        else:
            computes = _with_operators(encoder, weights, dtype, device, config)
        self._forward = computes.forward
        self.batch_invariant = computes.may_be_invariant and self._is_invariant()
        """True when a text's vector does not depend on the batch, bit for bit: measured on this machine at the
        start."""
        self.variant = computes.variant
        self.description = f"encoder with {computes.description}, {torch.get_num_threads()} threads"

    @torch.inference_mode()
    def run(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """For each text, given as token ids, the hidden states of its tokens: float32 [tokens, hidden_size]."""
        return list(self._forward(texts).cpu().split([len(text) for text in texts]))

    def _is_invariant(self) -> bool:
        generator = torch.Generator().manual_seed(0)
        sizes = [min(size, self.max_model_len) for size in _PROBED_SIZES]
        texts = [torch.randint(0, self.vocab_size, (size,), generator=generator).tolist() for size in sizes]
        together = self.run(texts)
        alone = [self.run([text])[0] for text in texts]
        return all(map(torch.equal, together, alone))


def _compiled_threads(
    encoder: EncoderConfig, config: TorchConfig, device: torch.device, on_progress: OnProgress
) -> ThreadPool | None:
    """None: torch's operators compute."""
    if device.type != "cpu":
        return None

    def why_not() -> str | None:
        from shard_server.engines.torch_engine.encoder.compiled_forward import why_not_compiled

        return why_not_compiled(encoder)

    wanted = ArithmeticChoice(dtype=config.dtype, kernels=config.kernels)
    return compiled_threads(encoder.attention, wanted, why_not, on_progress)


def _compiled(
    encoder: EncoderConfig,
    weights: dict[str, torch.Tensor],
    config: TorchConfig,
    threads: ThreadPool,
    on_progress: OnProgress,
) -> _Computes:
    from shard_server.engines.torch_engine.encoder.compiled_forward import CompiledEncoder, EncoderLinears
    from shard_server.engines.torch_engine.kernels.compiled_forward import CompiledKernels
    from shard_server.engines.torch_engine.kernels.form_choice import fastest_form_for_prompts

    in_8_bits, reason = config.weights == "int8", ""
    if config.weights == "auto":
        measured = fastest_form_for_prompts(threads, on_progress)
        in_8_bits, reason = measured.form is WeightForm.PACKED, f" ({measured.reason})"
    with torch.inference_mode():
        model = EncoderModel(
            encoder,
            weights,
            dtype=torch.float32,
            linears=EncoderLinears(threads, in_8_bits=in_8_bits),
            device=torch.device("cpu"),
        )
        forward = CompiledEncoder(model, encoder, threads).forward
    kernels = CompiledKernels(threads, are_grouped=in_8_bits)
    variant = f"{'int8' if in_8_bits else 'bfloat16'}/{kernels.arithmetic}"
    return _Computes(forward, True, variant, f"{kernels.label}, {'8-bit' if in_8_bits else 'bf16'} weights{reason}")


def _with_operators(
    encoder: EncoderConfig,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    config: TorchConfig,
) -> _Computes:
    if config.weights == "int8":
        raise EngineError("an encoder's int8 weights need compiled kernels: set shard.torch.weights to auto")
    is_invariant = config.deterministic and device.type == "cpu"
    linears = TorchLinears(INVARIANT_ROWS if is_invariant else None)
    with torch.inference_mode():
        model = EncoderModel(encoder, weights, dtype=dtype, linears=linears, device=device)
        granularity = common_row_granularity(model.distinct_products, dtype) if is_invariant else None

    def forward(texts: Sequence[Sequence[int]]) -> torch.Tensor:
        return model.forward(texts, -sum(map(len, texts)) % (granularity or 1))

    where = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    name = str(dtype).removeprefix("torch.")
    return _Computes(forward, granularity is not None, f"{name}/torch-{where}", f"torch's operators ({where}), {name}")


def _check_options(config: TorchConfig) -> None:
    if config.weights in ("packed", "int4"):
        raise EngineError(f"weights = {config.weights!r} is not supported for encoders: leave it at 'auto'")


class ScoreHead:
    """Makes a number of the hidden state of a pair's first token. It is small, and computes in float32."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        """Removes its own from the weights."""
        names = ("dense.weight", "dense.bias", "out.weight", "out.bias")
        self._dense, self._dense_bias, self._out, self._out_bias = (
            weights.pop(f"{_HEAD}{name}").to(torch.float32, copy=True) for name in names
        )

    @torch.inference_mode()
    def score(self, states: torch.Tensor) -> torch.Tensor:
        """`states`: those of all tokens of a pair. Returns a logit [1]."""
        inner = torch.tanh(self._dense @ states[0] + self._dense_bias)
        return self._out @ inner + self._out_bias


_HEAD: Final = "score_head."
_BERT_HEAD: Final = {"pooler.dense.": f"{_HEAD}dense.", "classifier.": f"{_HEAD}out."}
_ROBERTA_HEAD: Final = {"classifier.dense.": f"{_HEAD}dense.", "classifier.out_proj.": f"{_HEAD}out."}
"""The names in the files, and one for both families. RoBERTa's files may have a pooler besides, which nothing uses."""
_FAMILY_PREFIXES: Final = ("bert.", "roberta.")
_LEFT_OUT: Final = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids")
"""Heads for other uses, and tables that follow from the configuration."""


def load_encoder_weights(
    model_dir: Path, config: EncoderConfig, on_progress: OnProgress = lambda _message: None
) -> dict[str, torch.Tensor]:
    """The tensors by their names without the family, mapped rather than read. Raises EngineError."""
    check = functools.partial(_check_left_out, model_dir, config)
    head = _BERT_HEAD if config.model_type == "bert" else _ROBERTA_HEAD
    named = functools.partial(_with_head, head) if config.is_cross_encoder else _without_family
    return load_tensors(model_dir, expected_shapes(config), check, on_progress, named)


def expected_shapes(config: EncoderConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every tensor that is used, by its name without the family."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.num_positions, hidden),
        "embeddings.token_type_embeddings.weight": (config.num_token_types, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    linears = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
    }
    for layer in range(config.num_layers):
        prefix = f"encoder.layer.{layer}"
        for name, (rows, columns) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            shapes[f"{prefix}.{name}.bias"] = (rows,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{prefix}.{name}.weight"] = shapes[f"{prefix}.{name}.bias"] = (hidden,)
    if config.is_cross_encoder:
        shapes |= {f"{_HEAD}dense.weight": (hidden, hidden), f"{_HEAD}dense.bias": (hidden,)}
        shapes |= {f"{_HEAD}out.weight": (1, hidden), f"{_HEAD}out.bias": (1,)}
    return shapes


def _without_family(name: str) -> str:
    for prefix in _FAMILY_PREFIXES:
        name = name.removeprefix(prefix)
    # The names of TensorFlow, in old files.
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _with_head(head: Mapping[str, str], name: str) -> str:
    name = _without_family(name)
    for prefix, own in head.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def _check_left_out(model_dir: Path, config: EncoderConfig, name: str) -> None:
    """Raise EngineError for a tensor that the computation would ignore: it belongs to a different model."""
    if not name.startswith(_LEFT_OUT):
        raise EngineError(f"{model_dir}: unexpected tensor {name!r}: a {config.model_type} model has none of that name")
