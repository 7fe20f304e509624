"""Runs the model on an accelerator, as ModelRunner does on the CPU, with the same model code."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.arithmetic import DTYPES
from shard_server.engines.torch_engine.checkpoint.weights import OnProgress, load_weights
from shard_server.engines.torch_engine.config import LlamaConfig, load_config
from shard_server.engines.torch_engine.device.attention import (
    AttendPaged,
    Prompts,
    SingleRows,
    gathering_attention,
    piece_tokens,
    prompts_of,
    triton_attention,
)
from shard_server.engines.torch_engine.device.decode_steps import DecodeInputs, DecodeRow, DecodeSteps, step_sizes
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.lora.peft import LoraWeights
from shard_server.engines.torch_engine.lora.torch_adapter import AdaptedRows, TorchAdapter
from shard_server.engines.torch_engine.memory import kv_block_bytes
from shard_server.engines.torch_engine.model import LlamaModel
from shard_server.engines.torch_engine.model_runner import ScheduledSequence
from shard_server.engines.torch_engine.operators.attention import Extent
from shard_server.engines.torch_engine.operators.linear import TorchLinears
from shard_server.engines.torch_engine.uploads import upload, upload_tensor

_INVARIANT_ROWS: Final = 128
"""The number of rows of every matrix product if results must not depend on the batch: a library chooses its code by
that number. It is large enough that memory speed does not bound prefill, and small enough to cost decoding little."""
_KV_SHARE: Final = 0.85
"""The share of the memory left after loading the weights; the rest is for activations, libraries and recorded steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options of a DeviceRunner; 0 means the default."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    num_blocks: int = 0
    max_model_len: int = 0
    max_rows: int = 256
    """The largest number of rows of a decode step: sequences and their drafts."""
    wants_batch_invariance: bool = False


class DeviceRunner:
    """A model and its KV blocks on one device. Used from one thread at a time; see ModelRunner for `run`."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: dict[str, torch.Tensor],
        options: DeviceOptions,
        on_progress: OnProgress = lambda _message: None,
        make_attention: Callable[[LlamaConfig, KvCache], AttendPaged] | None = None,
    ) -> None:
        """Consumes `weights`. `make_attention` defaults to what is fastest on the device. Raises EngineError and
        torch.OutOfMemoryError."""
        self.config = config
        self._device = device = options.device
        dtype = str(options.dtype).removeprefix("torch.")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.variant = f"{dtype}/torch-{name}"
        self.description = f"{name}, {dtype} weights"
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self.hidden_size = config.hidden_size
        self._hidden_states: list[torch.Tensor] = []
        """Those that the latest batch wants."""
        self.max_model_len = options.max_model_len or config.max_position_embeddings
        if self.max_model_len > config.max_position_embeddings:
            raise EngineError(f"max_model_len is {self.max_model_len}, the model's is {config.max_position_embeddings}")
        self._block_size = options.block_size
        self._multiple = _INVARIANT_ROWS if options.wants_batch_invariance else 1
        self._rows_alone = options.wants_batch_invariance
        """True when all rows, also those of prompts, attend with the decoding kernel."""
        with torch.inference_mode():
            self._model = LlamaModel(
                config,
                weights,
                dtype=options.dtype,
                max_model_len=self.max_model_len,
                linears=TorchLinears(_INVARIANT_ROWS if options.wants_batch_invariance else None),
                on_progress=on_progress,
                device=device,
            )
            self.num_blocks = options.num_blocks or self._default_num_blocks(config, options)
            on_progress(f"KV cache: {self.num_blocks} blocks of {self._block_size} tokens")
            # One extra block, into which padding rows write.
            self._cache = KvCache(
                config,
                num_blocks=self.num_blocks + 1,
                block_size=self._block_size,
                dtype=options.dtype,
                device=device,
            )
            width = -(-self.max_model_len // self._block_size)
            attends = make_attention or (
                functools.partial(triton_attention, max_keys=width * self._block_size)
                if device.type == "cuda"
                else gathering_attention
            )
            self._attend = attends(config, self._cache)
            self._piece_tokens = piece_tokens(config, options.dtype)
            sizes = step_sizes(options.max_rows, self._multiple)
            self.drawn_tokens = torch.zeros(sizes[-1], dtype=torch.int64, device=device)
            """The tokens of the latest step, drawn on the device, by row of logits: the next step may compute with them
            before the CPU knows them."""
            self._decode_steps = DecodeSteps(
                self._decode,
                sizes=sizes,
                table_width=width,
                block_size=self._block_size,
                spare_block=self.num_blocks,
                vocab_size=config.vocab_size,
                drawn_tokens=self.drawn_tokens,
                device=device,
            )
            if device.type == "cuda":
                self._decode_steps.record(on_progress)
        self.batch_invariant = options.wants_batch_invariance and self._is_invariant()
        """True when logits do not depend on the batch, bit for bit: measured at the start."""

    @torch.inference_mode()
    def run(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor:
        """Runs as ModelRunner.run does, but returns before the device has computed; the logits lie there and are valid
        until the next step, in the order in which the device is given work."""
        decodes: list[DecodeRow] = []
        prompts: list[ScheduledSequence] = []
        places: list[tuple[bool, int, int]] = []  # (of a prompt, first row of logits, rows)
        self._hidden_states = []
        num_prompt_logits = 0
        for sequence in batch:
            num_logits = sequence.num_logits
            if len(sequence.token_ids) == num_logits and not sequence.num_prompt_logits:  # so it wants no hidden states
                places.append((False, len(decodes), num_logits))
                first = sequence.num_computed_tokens
                table = sequence.block_table
                own = sequence.adapter
                decodes += [DecodeRow(token, first + i, table, own) for i, token in enumerate(sequence.token_ids)]
            else:
                prompts.append(sequence)
                if num_logits:
                    places.append((True, num_prompt_logits, num_logits))
                    num_prompt_logits += num_logits
        of_decodes = self._run_decodes(decodes)
        of_prompts = self._run_prompts(prompts) if prompts else of_decodes[:0]
        if not num_prompt_logits:
            return of_decodes
        parts = [(of_prompts if is_prompt else of_decodes)[row : row + num] for is_prompt, row, num in places]
        return torch.cat(parts)

    def hidden_states(self) -> list[torch.Tensor]:
        """Returns what ModelRunner.hidden_states does, in the memory of the CPU."""
        return self._hidden_states

    def adapter(self, weights: LoraWeights) -> TorchAdapter:
        """An adapter in the form in which ScheduledSequence has it. Called in any thread."""
        return TorchAdapter(weights, self._device)

    def _run_decodes(self, rows: Sequence[DecodeRow]) -> torch.Tensor:
        largest = self._decode_steps.sizes[-1]
        if len(rows) <= largest:
            return self._decode_steps.run(rows) if rows else self._no_logits()
        parts = [
            self._decode_steps.run(rows[start : start + largest]).clone() for start in range(0, len(rows), largest)
        ]
        return torch.cat(parts)

    def _no_logits(self) -> torch.Tensor:
        return torch.empty(0, self.vocab_size, dtype=torch.float32, device=self._device)

    def _decode(self, inputs: DecodeInputs, adapters: Sequence[TorchAdapter | None] | None) -> torch.Tensor:
        rows = SingleRows(inputs.tables, inputs.lengths)
        x = self._last_layer(inputs.token_ids, inputs.positions, inputs.slots, rows, adapters)
        return self._model.logits(x, torch.arange(len(inputs.token_ids), device=self._device))

    def _run_prompts(self, prompts: Sequence[ScheduledSequence]) -> torch.Tensor:
        num_tokens = sum(len(sequence.token_ids) for sequence in prompts)
        num_padding = -num_tokens % self._multiple
        # Padding rows are a prompt of one token each, in the spare block.
        inputs = np.zeros((3, num_tokens + num_padding), np.int64)
        token_ids, positions, slots = inputs
        slots[num_tokens:] = self.num_blocks * self._block_size
        extents: list[Extent] = []
        logit_rows: list[int] = []
        first = 0
        for sequence in prompts:
            num_past, end = sequence.num_computed_tokens, first + len(sequence.token_ids)
            extents.append(Extent(first, end - first, num_past, sequence.block_table))
            token_ids[first:end] = sequence.token_ids
            positions[first:end] = position = np.arange(num_past, num_past + end - first)
            block, offset = np.divmod(position, self._block_size)
            slots[first:end] = np.asarray(sequence.block_table)[block] * self._block_size + offset
            logit_rows += range(end - sequence.num_logits, end)
            first = end
        extents += [Extent(row, 1, 0, [self.num_blocks]) for row in range(num_tokens, num_tokens + num_padding)]
        num_logits = len(logit_rows)
        logit_rows += [0] * (-num_logits % self._multiple)
        part = prompts_of(extents, self._piece_tokens)
        of_row = [sequence.adapter for sequence in prompts for _ in sequence.token_ids]
        on_device = upload_tensor(torch.from_numpy(inputs), self._device)
        x = self._last_layer(
            on_device[0],
            on_device[1],
            on_device[2],
            (part.each_row() if self._rows_alone else part).to(self._device),
            of_row if any(adapter is not None for adapter in of_row) else None,
        )
        self._hidden_states = [
            self._model.hidden_states(x[extent.first_row : extent.first_row + extent.num_new]).cpu()
            for extent, sequence in zip(extents, prompts, strict=False)
            if sequence.wants_hidden_states
        ]
        return self._model.logits(x, upload(logit_rows, self._device, torch.int64))[:num_logits]

    def _last_layer(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        part: SingleRows | Prompts,
        adapters: Sequence[TorchAdapter | None] | None,
    ) -> torch.Tensor:
        windows = self.config.layer_windows
        return self._model.last_layer(
            token_ids,
            positions,
            self._cache.token_rows(slots),
            lambda layer, queries: self._attend(part, layer, queries, windows[layer]),
            self._cache,
            None if adapters is None else AdaptedRows(adapters, self._device),
        )

    def _default_num_blocks(self, config: LlamaConfig, options: DeviceOptions) -> int:
        if self._device.type != "cuda":
            raise EngineError("num_blocks must be given")
        free, _ = torch.cuda.mem_get_info(self._device)
        block_bytes = kv_block_bytes(config, options.block_size, options.dtype)
        num_blocks = int(free * _KV_SHARE / block_bytes)
        if num_blocks * options.block_size < self.max_model_len:
            raise EngineError(
                f"too little memory on the device: {free / 2**30:.1f} GiB are left after the weights, one sequence of "
                f"{self.max_model_len} tokens needs more than {_KV_SHARE:.0%} of that; lower max_model_len"
            )
        return num_blocks

    def _is_invariant(self) -> bool:
        """Compare a random sequence's logits after a prefill, after prefill in chunks and decoding, and in a batch.
        Uses the first blocks, which hold nothing yet."""
        num_tokens = min(self.max_model_len, 200)
        num_blocks = -(-num_tokens // self._block_size)
        if 2 * num_blocks > self.num_blocks:
            return False
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (num_tokens,), generator=generator).tolist()
        table, other = range(num_blocks), range(num_blocks, 2 * num_blocks)
        whole = self.run([ScheduledSequence(ids, 0, table, True)]).clone()
        cut, last = num_tokens // 3, num_tokens - 1
        self.run([ScheduledSequence(ids[:cut], 0, other, False)])
        self.run([ScheduledSequence(ids[cut:last], cut, other, False)])
        decode = ScheduledSequence(ids[last:], last, other, True)
        shorter = [ScheduledSequence(ids[end : end + 1], end, other, True) for end in range(cut, cut + 40)]
        for batch in ([decode], [decode, *shorter], [decode, ScheduledSequence(ids[5:20], 5, table, False)]):
            if not torch.equal(self.run(batch)[:1], whole):
                return False
        return True


def find_device(name: str) -> torch.device:
    """The device by its name. Raises EngineError with what is missing when it cannot be used."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if torch.version.cuda is None:
        raise EngineError(
            f"device = 'cuda', but torch {torch.__version__} is built without CUDA: install the CUDA build of torch "
            f"{torch.__version__.partition('+')[0]}"
        )
    if not torch.cuda.is_available():
        raise EngineError("device = 'cuda', but no NVIDIA GPU can be used here (is its driver loaded? nvidia-smi)")
    return device


def load_device_runner(
    model_dir: Path,
    *,
    device: str,
    max_rows: int,
    dtype: str,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    num_threads: int,
    wants_batch_invariance: bool,
    weights: str,
    kernels: str,
    shared_cores: int,  # noqa: ARG001  (of the CPU)
    shares_weights: bool,  # noqa: ARG001  (likewise)
    on_progress: Callable[[str], None],
) -> DeviceRunner:
    """Build a DeviceRunner, with the arguments of ModelRunner's constructor. Raises EngineError."""
    found = find_device(device)
    if weights == "int8" or kernels != "auto":
        raise EngineError("weights = 'int8' and kernels are for the CPU: with device = 'cuda' leave both at 'auto'")
    if num_threads:
        torch.set_num_threads(num_threads)
    config = load_config(model_dir)
    options = DeviceOptions(
        device=found,
        dtype=torch.bfloat16 if dtype == "auto" else DTYPES[dtype],
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_rows=max_rows,
        wants_batch_invariance=wants_batch_invariance,
    )
    try:
        return DeviceRunner(config, load_weights(model_dir, config, on_progress), options, on_progress)
    except torch.OutOfMemoryError as error:
        raise EngineError(f"too little memory on the device: {error}") from error
