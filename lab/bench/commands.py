"""`kvloom-lab bench`: the commands by name."""

from __future__ import annotations

import click

from tools.cli.lazy_group import LazyGroup


@click.group(
    cls=LazyGroup,
    commands_at={
        "autoscaling": "lab.bench.autoscaling:bench_autoscaling",
        "index": "lab.bench.prefix_index:bench_index",
        "epp": "lab.bench.epp:bench_epp",
        "encoder-peers": "lab.bench.encoder_peers.command:bench_encoder_peers",
        "engine-peers": "lab.bench.engine_peers.command:bench_engine_peers",
        "data-plane": "lab.bench.data_plane.command:bench_data_plane",
        "injections": "lab.bench.injections.command:bench_injections",
        "regions": "lab.bench.regions:bench_regions",
        "phrases": "lab.bench.phrases:bench_phrases",
        "search-quality": "lab.bench.search_quality:bench_search_quality",
        "vector-search": "lab.bench.vector_search:bench_vector_search",
        "weight-quality": "lab.bench.weight_quality:bench_weight_quality",
        "regimes": "lab.study.regimes_command:regimes_command",
        "routing": "lab.study.command:study_command",
    },
)
def bench() -> None:
    """Measure what parts and policies cost and bring, also beside others' gateways and engines."""
