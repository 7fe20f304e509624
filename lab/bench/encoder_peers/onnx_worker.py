"""Runs ONNX Runtime for `kvloom-lab bench encoder-peers`: it reads orders as JSON lines and writes answers.

It runs in that engine's own interpreter, so this file imports only the standard library and what is installed there.
The graph is made of the fused operators that ONNX Runtime's own optimizer makes of an exported BERT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Encoder(Protocol):
    """A loaded engine."""

    version: str

    def run(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The mean of each text's hidden states, of length 1."""
        ...


class OnnxEncoder:
    """A BERT in float32, for batches that are padded to their longest text."""

    def __init__(self, model_dir: str, num_threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        model = _Graph(Path(model_dir)).serialised()
        self.version = f"onnxruntime {onnxruntime.__version__}, float32"
        self._session: Any = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Implements `Encoder.run`."""
        size = max(map(len, texts))
        ids, mask = np.zeros((len(texts), size), np.int64), np.zeros((len(texts), size), np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        (states,) = self._session.run(None, {"ids": ids, "mask": mask, "size": np.array([size])})
        means = (states * mask[..., None]).sum(1) / mask.sum(1)[:, None]
        return (means / np.linalg.norm(means, axis=1, keepdims=True)).tolist()


class _Graph:
    def __init__(self, model_dir: Path) -> None:
        from safetensors.numpy import load_file

        self._config = json.loads((model_dir / "config.json").read_text())
        weights = load_file(str(model_dir / "model.safetensors"))
        self._weights = {name.removeprefix("bert."): weight for name, weight in weights.items()}
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def serialised(self) -> bytes:
        from onnx import TensorProto, helper

        own, weights = "com.microsoft", self._weights
        table = "embeddings.position_embeddings.weight"
        places = self._constant(weights[table] + weights["embeddings.token_type_embeddings.weight"][0])
        zero = self._constant(np.array([0]))
        words = self._node("Gather", [self._constant(weights["embeddings.word_embeddings.weight"]), "ids"])
        x = self._node("Add", [words, self._node("Slice", [places, zero, "size", zero])])
        epsilon = self._config["layer_norm_eps"]
        x = self._node("LayerNormalization", [x, *self._norm("embeddings.LayerNorm")], epsilon=epsilon, axis=-1)
        for number in range(self._config["num_hidden_layers"]):
            prefix = f"encoder.layer.{number}"
            parts = [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")]
            weight, bias = (
                np.concatenate([weights[f"{part}.{kind}"] for part in parts]) for kind in ("weight", "bias")
            )
            inputs = [x, self._constant(weight.T), self._constant(bias), "mask"]
            heads = self._config["num_attention_heads"]
            x = self._added(
                self._node("Attention", inputs, num_heads=heads, domain=own), x, f"{prefix}.attention.output"
            )
            inner = self._node("MatMul", [x, self._constant(weights[f"{prefix}.intermediate.dense.weight"].T)])
            inputs = [inner, self._constant(weights[f"{prefix}.intermediate.dense.bias"])]
            x = self._added(self._node("BiasGelu", inputs, domain=own), x, f"{prefix}.output")
        sides = ["batch", "tokens"]
        inputs = [
            helper.make_tensor_value_info("ids", TensorProto.INT64, sides),
            helper.make_tensor_value_info("mask", TensorProto.INT32, sides),
            helper.make_tensor_value_info("size", TensorProto.INT64, [1]),
        ]
        outputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, [*sides, self._config["hidden_size"]])]
        graph = helper.make_graph(self._nodes, "encoder", inputs, outputs, self._constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(own, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()

    def _added(self, x: str, other: str, name: str) -> str:
        """The norm of a product and what it is added to"""
        product = self._node("MatMul", [x, self._constant(self._weights[f"{name}.dense.weight"].T)])
        inputs = [product, other, *self._norm(f"{name}.LayerNorm"), self._constant(self._weights[f"{name}.dense.bias"])]
        epsilon = self._config["layer_norm_eps"]
        return self._node("SkipLayerNormalization", inputs, epsilon=epsilon, domain="com.microsoft")

    def _norm(self, name: str) -> list[str]:
        return [self._constant(self._weights[f"{name}.{kind}"]) for kind in ("weight", "bias")]

    def _constant(self, array: Any) -> str:
        from onnx import numpy_helper

        name = f"constant{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def _node(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        from onnx import helper

        name = f"node{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name


def serve(load: Callable[[], Encoder]) -> None:
    """Serve orders until stdin ends. Output that the engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    begin = time.perf_counter()
    encoder = load()
    answer({"version": encoder.version, "load_seconds": time.perf_counter() - begin})
    for line in sys.stdin:
        order = json.loads(line)
        begin = time.perf_counter()
        vectors = encoder.run(order["texts"])
        answer({"seconds": time.perf_counter() - begin, "vectors": vectors})


if __name__ == "__main__":
    serve(lambda: OnnxEncoder(sys.argv[1], int(sys.argv[2])))
