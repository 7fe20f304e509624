"""Two fabrics that share a Redis server and a secret are one fleet, if their names differ."""

from __future__ import annotations

import os
from pathlib import Path

from tests.e2e.fabric import RunningFabric, run_kvloom
from tests.fakes.redis_server import redis_server

SHARD = ("--engine", "sim", "--shards", "1")


def test_two_fabrics_share_a_registry_only_with_different_names(model_dir: Path, tmp_path: Path) -> None:
    """Two machines whose shards have the same names would overwrite each other's records and both say "ready"."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(run_kvloom("secret", "new", env=dict(os.environ)).stdout)
    with redis_server() as server:
        settings = {"KVLOOM_REDIS_URL": server.connection_url, "KVLOOM_SECRET_FILE": str(secret)}
        first = RunningFabric.start(tmp_path / "first", *SHARD, **settings)
        try:
            other_place = first.env | {"KVLOOM_DATA_DIR": str(tmp_path / "second")}
            same_names = run_kvloom("up", "--detach", *SHARD, env=other_place)
            assert same_names.returncode == 1
            assert "shard-0 is the name of another process of this fleet" in same_names.stdout + same_names.stderr
            second = RunningFabric.start(tmp_path / "second", *SHARD, "--name-prefix", "west-", **settings)
            try:
                placed = run_kvloom("explain", "--prompt", "hello", "--json", env=second.env).stdout
                assert '"shard-0"' in placed
                assert '"west-shard-0"' in placed
            finally:
                second.stop()
        finally:
            first.stop()
