"""An encoder behind a FakeRouterLink: texts that share tokens have similar vectors."""

from __future__ import annotations

from typing import Final

from kvloom.v1.router_service_pb2 import ModelInfo
from kvloom_common.models.served_model import ServedModel
from shard_server.engines.base import Pooling, PoolingKind
from shard_server.engines.sim_tokens import EMBEDDING_SIZE, sim_embedding
from tests.fakes.fake_router_link import FakeRequest, Script
from tests.fakes.tiny_tokenizer import model_tokenizer

ENCODER: Final = "encoder"
WINDOW: Final = 512
_POOLING: Final = Pooling(PoolingKind.MEAN, normalize=True)


def encoder_model() -> ServedModel:
    return ServedModel(ENCODER, model_tokenizer(), 1_700_000_000, "fp_test")


def encoder_info(num_ready_shards: int = 1) -> ModelInfo:
    return ModelInfo(
        name=ENCODER,
        num_ready_shards=num_ready_shards,
        max_model_len=WINDOW,
        capabilities=["embed"],
        embedding_size=EMBEDDING_SIZE,
    )


def embedding(otherwise: Script) -> Script:
    """Returns a script that answers requests for vectors, and leaves the others to another one."""

    def play(request: FakeRequest) -> None:
        if not request.request.wanted.HasField("pooling"):
            otherwise(request)
            return
        request.start()
        request.finish(embedding=sim_embedding(list(request.request.prompt_token_ids), _POOLING))

    return play
