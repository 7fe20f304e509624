"""`python -m lab.damaged_model SOURCE OUT --layer N`: a copy of a model with one damaged layer, to see what finds it.

Every weight matrix of the layer gets Gaussian noise, whose standard deviation is `--noise` times that of the matrix.
The noise is always the same. SOURCE is a directory with one *.safetensors file, as `kvloom up` makes of a .gguf file;
a damaged matrix that is also packed is packed anew, in 8 bits.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import click
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shard_server.engines.torch_engine.checkpoint.packed_files import PACKED_SUFFIX, packed_parts
from shard_server.engines.torch_engine.grouped_weight import quantised
from tools.failures import CommandError

CONVERSION_FILE: Final = "conversion.json"
"""It says of which file the weights were made, which does not hold for the copy."""


def damage(source: Path, out: Path, layer: int, noise: float) -> int:
    """Returns how many matrices were damaged. Raises CommandError."""
    found = sorted(source.glob("*.safetensors"))
    if len(found) != 1:
        raise CommandError(f"{source} has {len(found)} *.safetensors files, and must have one")
    weights = load_file(found[0])
    with safe_open(found[0], framework="pt") as file:
        metadata = file.metadata()
    generator = torch.Generator().manual_seed(layer)
    names = [name for name in sorted(weights) if f".layers.{layer}." in name and weights[name].dim() == 2]
    if not names:
        raise CommandError(f"{source} has no layer {layer}")
    for name in names:
        clean = weights[name].float()
        damaged = clean + noise * clean.std() * torch.randn(clean.shape, generator=generator)
        weights[name] = damaged.to(weights[name].dtype)
    out.mkdir(parents=True, exist_ok=True)
    packed = sorted(source.glob(f"*{PACKED_SUFFIX}"))
    for file in source.iterdir():
        if file.is_file() and file not in (found[0], source / CONVERSION_FILE, *packed):
            shutil.copy(file, out / file.name)
    for file in packed:
        _pack_anew(file, out / file.name, {name: weights[name] for name in names})
    save_file(weights, out / found[0].name, metadata=metadata)
    return len(names)


def _pack_anew(source: Path, out: Path, damaged: dict[str, torch.Tensor]) -> None:
    """Write the packed weights of `source` with those of `damaged` matrices that it holds."""
    tensors = load_file(source)
    for name, weight in damaged.items():
        if f"{name}.scales" in tensors:
            tensors = {part: tensor for part, tensor in tensors.items() if not part.startswith(f"{name}.")}
            tensors |= packed_parts(name, quantised(weight, 8))
    save_file(tensors, out)


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--layer", type=click.IntRange(min=0), required=True, help="Its number, from 0.")
@click.option("--noise", type=click.FloatRange(min=0), default=1.0, show_default=True, help="See above.")
def main(source: Path, out: Path, layer: int, noise: float) -> None:
    """Write a copy of the model in SOURCE to OUT, with a damaged layer."""
    count = damage(source, out, layer, noise)
    click.echo(f"{out}: {count} matrices of layer {layer} have noise of {noise:g} times their standard deviation")


if __name__ == "__main__":
    main()
