"""`python -m lab.shallow_model SOURCE OUT --layers N`: the first layers of a model, whose bits depend on its
weights as those of all layers do, for tests and measurements that would take long with the whole model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import click
from safetensors.torch import load_file, save_file

from lab.damaged_model import CONVERSION_FILE
from shard_server.engines.torch_engine.checkpoint.packed_files import PACKED_SUFFIX
from tools.failures import CommandError

_WEIGHTS = (".safetensors", PACKED_SUFFIX)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write_shallow_model(model_dir: Path, target: Path, num_layers: int) -> Path:
    """Returns `target`, which gets the model with fewer layers."""
    target.mkdir(parents=True)
    for file in model_dir.iterdir():
        if file.is_file() and file.suffix not in _WEIGHTS and file.name != CONVERSION_FILE:
            shutil.copy(file, target)
    config = json.loads((model_dir / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    for file in (file for suffix in _WEIGHTS for file in model_dir.glob(f"*{suffix}")):
        kept = {name: tensor for name, tensor in load_file(file).items() if _is_kept(name, num_layers)}
        save_file(kept, target / file.name)
    return target


def _is_kept(name: str, num_layers: int) -> bool:
    layer = _LAYER.match(name)
    return layer is None or int(layer[1]) < num_layers


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path, exists=False))
@click.option("--layers", "num_layers", type=click.IntRange(min=1), required=True, help="How many are kept.")
def main(source: Path, out: Path, num_layers: int) -> None:
    """Write the first layers of the model in SOURCE to OUT, which must not exist."""
    if out.exists():
        raise CommandError(f"{out} exists already")
    write_shallow_model(source, out, num_layers)
    click.echo(f"{out}: the first {num_layers} layers of {source.name}")


if __name__ == "__main__":
    main()
