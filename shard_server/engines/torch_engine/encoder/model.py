"""The encoder: a forward pass over a flat batch of tokens from many texts, each of which sees all of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from shard_server.engines.torch_engine.encoder.config import EncoderConfig
from shard_server.engines.torch_engine.operators.linear import Linear, MakesLinears, Product

_Norm = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(slots=True)
class EncoderLayer:
    qkv: Linear
    attention_output: Linear
    attention_norm: _Norm
    intermediate: Linear
    output: Linear
    output_norm: _Norm


class EncoderModel:
    """The weights, converted for computing, and the forward pass."""

    def __init__(
        self,
        config: EncoderConfig,
        weights: dict[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        linears: MakesLinears,
        device: torch.device,
    ) -> None:
        """Consumes `weights`: entries are removed as they are converted."""
        self._config = config
        self._device = device

        def take(name: str) -> torch.Tensor:
            # A copy, so that nothing keeps a reference to the mapped file.
            return weights.pop(name).to(device, dtype, copy=True)

        def norm(name: str) -> _Norm:
            return take(f"{name}.weight"), take(f"{name}.bias")

        def linear(*names: str) -> Linear:
            matrices = [take(f"{name}.weight") for name in names]
            return linears.linear(torch.cat(matrices), torch.cat([take(f"{name}.bias") for name in names]))

        self._words = take("embeddings.word_embeddings.weight")
        # Every token has the first type, but those of the second text of a pair. Only BERT's tokenizers tell types.
        types = take("embeddings.token_type_embeddings.weight")
        self._positions = take("embeddings.position_embeddings.weight") + types[0]
        has_pairs = config.is_cross_encoder and config.model_type == "bert" and len(types) > 1
        self._second_type = types[1] - types[0] if has_pairs else None
        self.embedding_norm = norm("embeddings.LayerNorm")
        self.layers: list[EncoderLayer] = []
        for index in range(config.num_layers):
            prefix = f"encoder.layer.{index}"
            attention = f"{prefix}.attention"
            self.layers.append(
                EncoderLayer(
                    qkv=linear(*(f"{attention}.self.{name}" for name in ("query", "key", "value"))),
                    attention_output=linear(f"{attention}.output.dense"),
                    attention_norm=norm(f"{attention}.output.LayerNorm"),
                    intermediate=linear(f"{prefix}.intermediate.dense"),
                    output=linear(f"{prefix}.output.dense"),
                    output_norm=norm(f"{prefix}.output.LayerNorm"),
                )
            )

    @property
    def distinct_products(self) -> list[Product]:
        """One product of every shape."""
        layer = self.layers[0]
        return [layer.qkv, layer.attention_output, layer.intermediate, layer.output]

    def forward(self, texts: Sequence[Sequence[int]], num_padding: int) -> torch.Tensor:
        """`texts` are token ids; `num_padding` rows are computed besides, without a meaning.

        Returns the hidden states of all tokens, one text after the other: float32 [tokens, hidden_size].
        """
        sizes = [len(text) for text in texts]
        x = F.pad(self.embed(texts), (0, 0, 0, num_padding))
        x = self._normalise(x, self.embedding_norm)
        for layer in self.layers:
            attended = self._attend(layer.qkv(x), sizes)
            x = self._normalise(layer.attention_output.add(attended, x), layer.attention_norm)
            inner = F.gelu(layer.intermediate(x))
            x = self._normalise(layer.output.add(inner, x), layer.output_norm)
        return x[: sum(sizes)].float()

    def embed(self, texts: Sequence[Sequence[int]], out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of the embeddings of each token and its position, in the type of the weights."""
        first = self._config.first_position
        token_ids = [token_id for text in texts for token_id in text]
        positions = [position for text in texts for position in range(first, first + len(text))]
        x = torch.index_select(self._words, 0, torch.tensor(token_ids, device=self._device), out=out)
        x.add_(torch.index_select(self._positions, 0, torch.tensor(positions, device=self._device)))
        if self._second_type is not None:
            begin = 0
            for text in texts:
                x[begin + _first_size(text) : begin + len(text)].add_(self._second_type)
                begin += len(text)
        return x

    def _attend(self, qkv: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Each text by itself, so that its result does not depend on the others. Rows of padding become zero."""
        out = torch.zeros(len(qkv), self._config.hidden_size, dtype=qkv.dtype, device=qkv.device)
        begin = 0
        for size in sizes:
            rows = qkv[begin : begin + size]
            queries, keys, values = rows.view(size, 3, self._config.num_heads, -1).permute(1, 2, 0, 3)[:, None]
            attended = F.scaled_dot_product_attention(queries, keys, values)
            out[begin : begin + size] = attended[0].transpose(0, 1).reshape(size, -1)
            begin += size
        return out

    def _normalise(self, x: torch.Tensor, norm: _Norm) -> torch.Tensor:
        return F.layer_norm(x, norm[0].shape, *norm, self._config.layer_norm_eps)


def _first_size(pair: Sequence[int]) -> int:
    """The tokens of the first text of a pair, with its separator, which is also the pair's last token."""
    return list(pair).index(pair[-1]) + 1
