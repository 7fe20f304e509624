"""The processes that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from kvloom_common.config import KvloomConfig
from tools.supervisor.process_specs import plan_stages


def shard_processes(num_shards: int, shards_per_process: int) -> list[tuple[str, ...]]:
    """Their arguments behind the configuration file's."""
    config = KvloomConfig()
    config.redis.url = "redis://127.0.0.1:1/0"
    config.shard.engine = "sim"
    config.shard.num_shards, config.shard.sim.shards_per_process = num_shards, shards_per_process
    [services] = plan_stages(config, config_path=Path("kvloom.json"), embed_redis=False, start_timeout_seconds=1.0)
    return [spec.argv[3:] for spec in services if spec.role == "shard"]


def test_every_shard_is_in_exactly_one_process() -> None:
    """Names are numbered through: a router that saw one twice would connect to one of them only."""
    own = shard_processes(3, 1)
    assert [argv[0] for argv in own] == ["shard_server"] * 3
    shared = shard_processes(10, 4)
    assert [(argv[0], *argv[-4:]) for argv in shared] == [
        ("tools.many_shards", "--first", "0", "--count", "4"),
        ("tools.many_shards", "--first", "4", "--count", "4"),
        ("tools.many_shards", "--first", "8", "--count", "2"),
    ]
