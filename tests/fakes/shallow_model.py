"""The first layers of a model, for tests that run all of its shapes many times."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write_shallow_model(model_dir: Path, target: Path, num_layers: int) -> Path:
    """Returns `target`, which gets the model with fewer layers."""
    target.mkdir()
    for file in model_dir.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    config = json.loads((model_dir / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    for file in model_dir.glob("*.safetensors"):
        kept = {name: tensor for name, tensor in load_file(file).items() if _is_kept(name, num_layers)}
        save_file(kept, target / file.name)
    return target


def _is_kept(name: str, num_layers: int) -> bool:
    layer = _LAYER.match(name)
    return layer is None or int(layer[1]) < num_layers
