"""How a model's embeddings are meant to be made, as sentence-transformers writes it beside the weights: `modules.json`,
`sentence_bert_config.json` and the pooling's `config.json`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from shard_server.engines.base import EngineError, PoolingKind
from shard_server.engines.torch_engine.config_values import read_json, read_object

_KNOWN_MODULES: Final = ("Transformer", "Pooling", "Normalize")
_POOLING_KINDS: Final = {
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}


@dataclasses.dataclass(frozen=True, slots=True)
class SentenceConfig:
    """Holds what was found; a model that was not trained for embeddings has none of it."""

    pooling: PoolingKind | None = None
    max_tokens: int | None = None
    """The longest text that the model was trained for, in tokens."""
    is_sentence_model: bool = False
    """True when there is a modules.json."""


def load_sentence_config(model_dir: Path) -> SentenceConfig:
    """Read the files, as far as there are any. Raises EngineError for one that is damaged or asks for something that is
    not supported."""
    path = model_dir / "modules.json"
    if not path.is_file():
        return SentenceConfig()
    try:
        modules = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in read_json(path)]
    except (KeyError, TypeError) as error:
        raise EngineError(f"{path}: it must hold a list of modules, each with a type and a path") from error
    for kind, _ in modules:
        if kind not in _KNOWN_MODULES:
            raise EngineError(f"{path}: the module {kind!r} is not supported, only {', '.join(_KNOWN_MODULES)}")
    folders = [folder for kind, folder in modules if kind == "Pooling"]
    pooling = _pooling_in(_inside(model_dir, folders[0]) / "config.json") if folders else None
    return SentenceConfig(pooling, _max_tokens(model_dir), is_sentence_model=True)


def _inside(model_dir: Path, folder: str) -> Path:
    # The file is untrusted input: its paths must not lead out of the directory.
    if Path(folder).name != folder:
        raise EngineError(f"{model_dir / 'modules.json'}: {folder[:100]!r} is not the name of a folder beside it")
    return model_dir / folder


def _pooling_in(path: Path) -> PoolingKind:
    content = read_object(path)
    modes = [name for name, value in content.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLING_KINDS:
        named = ", ".join(modes) or "none"
        raise EngineError(f"{path}: pooling is supported over one of mean, cls and lasttoken, and not over {named}")
    return _POOLING_KINDS[modes[0]]


def _max_tokens(model_dir: Path) -> int | None:
    path = model_dir / "sentence_bert_config.json"
    value = read_object(path).get("max_seq_length") if path.is_file() else None
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise EngineError(f"{path}: max_seq_length must be a positive integer, not {value!r}")
    return value
