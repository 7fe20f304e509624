"""kvloom.toml as arguments of LLM: what the version lacks, what kvloom sets, and what must never be left at the
library's default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvloom_common.config import ConfigError, ShardConfig, TensorRtLlmConfig, load_config
from shard_server.engines.base import EngineError
from shard_server.engines.tensorrt_llm.api import load_tensorrt_llm
from shard_server.engines.tensorrt_llm.llm_options import OWNED, llm_options
from tests.fakes.fake_tensorrt_llm import NEWEST, RELEASE_1_2, LibraryRelease, Variant, installed_tensorrt_llm

BOTH = pytest.mark.parametrize("release", [RELEASE_1_2, NEWEST], ids=["1.2.1", "newest"])


def arguments_of(
    options: dict[str, Any] | None = None, release: LibraryRelease = RELEASE_1_2, **shard: Any
) -> dict[str, Any]:
    """What the LLM of a release gets."""
    return of_config(TensorRtLlmConfig(options=options or {}), Variant(release=release), **shard)


def of_config(config: TensorRtLlmConfig, variant: Variant | None = None, **shard: Any) -> dict[str, Any]:
    with installed_tensorrt_llm(variant):
        shard_config = ShardConfig(engine="tensorrt_llm", tensorrt_llm=config, **shard)
        return llm_options(load_tensorrt_llm(), Path("/models/llama"), shard_config, 4096)


def test_the_defaults_are_what_the_adapter_relies_on():
    """Events, statistics, no tokenizer, the backend without the cancel crash."""
    arguments = arguments_of(block_size=32)
    assert arguments["model"] == "/models/llama"
    assert arguments["skip_tokenizer_init"] is True
    assert arguments["enable_iter_perf_stats"] is True
    assert arguments["enable_chunked_prefill"] is True
    assert arguments["backend"] == "pytorch"
    assert arguments["max_batch_size"] == 64
    assert arguments["max_seq_len"] == 4096
    cache = arguments["kv_cache_config"]
    assert cache.event_buffer_max_size > 0, "0 would mean no events"
    assert (cache.tokens_per_block, cache.max_tokens) == (32, None)
    assert (arguments["cuda_graph_config"].max_batch_size, arguments["cuda_graph_config"].enable_padding) == (64, True)
    for absent in ("speculative_config", "guided_decoding_backend", "enable_lora", "cache_transceiver_config"):
        assert absent not in arguments


def test_blocks_become_tokens():
    """The library counts its cache in tokens."""
    assert arguments_of(num_blocks=10, block_size=32)["kv_cache_config"].max_tokens == 320


def test_nested_options_reach_the_librarys_classes():
    """Whatever trtllm-serve takes in its file is to be had, under the same name."""
    arguments = arguments_of(
        {
            "tensor_parallel_size": 4,
            "pipeline_parallel_size": 2,
            "moe_expert_parallel_size": 4,
            "enable_chunked_prefill": False,
            "stream_interval": 4,
            "guided_decoding_backend": "llguidance",
            "kv_cache_config": {"host_cache_size": 2**30, "dtype": "fp8", "mamba_ssm_cache_dtype": "float32"},
            "cuda_graph_config": {"batch_sizes": [1, 8], "max_batch_size": 8},
            "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
            "cache_transceiver_config": {"backend": "NIXL"},
            "lora_config": {"max_lora_rank": 8, "lora_target_modules": ["attn_q"]},
            "kv_connector_config": {
                "connector_module": "kvbm",
                "connector_scheduler_class": "Leader",
                "connector_worker_class": "Worker",
            },
            "moe_config": {"backend": "CUTLASS"},
        }
    )
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (4, 2)
    assert (arguments["moe_expert_parallel_size"], arguments["stream_interval"]) == (4, 4)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["skip_tokenizer_init"] is False, "guides are compiled against the vocabulary"
    cache = arguments["kv_cache_config"]
    assert (cache.host_cache_size, cache.dtype, cache.mamba_ssm_cache_dtype) == (2**30, "fp8", "float32")
    assert cache.event_buffer_max_size > 0, "what is not written keeps kvloom's default"
    graphs = arguments["cuda_graph_config"]
    assert (graphs.batch_sizes, graphs.max_batch_size, graphs.enable_padding) == ([1, 8], 8, True)
    assert arguments["scheduler_config"].capacity_scheduler_policy == "MAX_UTILIZATION"
    transceiver = arguments["cache_transceiver_config"]
    assert (transceiver.backend, transceiver.kv_transfer_timeout_ms) == ("NIXL", 60_000)
    assert arguments["enable_lora"] is True
    lora = arguments["lora_config"]
    assert (lora.max_lora_rank, lora.max_loras, lora.lora_target_modules) == (8, 4, ["attn_q"])
    assert arguments["kv_connector_config"].connector_worker_class == "Worker"
    assert arguments["moe_config"] == {"backend": "CUTLASS"}, "the constructor checks what the adapter does not know"


def test_false_in_place_of_a_table_is_none():
    """TOML has no word for it."""
    assert arguments_of({"cuda_graph_config": False})["cuda_graph_config"] is None
    with pytest.raises(EngineError, match=r"options\.kv_cache_config: it is a table"):
        arguments_of({"kv_cache_config": 3})


@pytest.mark.parametrize("path", OWNED)
def test_what_kvloom_sets_is_refused_by_name(path: str):
    """Otherwise one of two settings would win without a word."""
    name, _, inner = path.partition(".")
    speculation = {"decoding_type": "NGram", "max_draft_len": 2} if name == "speculative_config" else {}
    with pytest.raises(EngineError, match=rf"shard\.tensorrt_llm\.options\.{path} is set by kvloom, from "):
        arguments_of({name: {inner: 1, **speculation} if inner else 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_such_thing": 1}, r"options\.no_such_thing: TensorRT-LLM 1\.2\.1's LLM has no no_such_thing"),
        ({"kv_cache_config": {"disk_prefetch": 1}}, r"options\.kv_cache_config: .*KvCacheConfig has no disk_prefetch"),
        ({"scheduler_config": {"waiting_queue_policy": "priority"}}, r"scheduler_config: .*no waiting_queue_policy"),
        ({"kv_connector_config": {"connector": "lmcache"}}, r"kv_connector_config: .*no connector"),
        ({"kv_connector_config": {"connector_module": "m"}}, r"kv_connector_config: .*refuses it: .*required"),
        ({"tensor_parallel_size": "two"}, r"tensor_parallel_size is 'two'.*int"),
        ({"kv_cache_config": {"event_buffer_max_size": 0}}, "event_buffer_max_size: 0 would hide the cache"),
    ],
)
def test_what_the_version_lacks_or_refuses_is_an_error_that_names_it(options: dict[str, Any], message: str):
    """The constructor's own message comes after minutes, and from another process."""
    with pytest.raises(EngineError, match=message):
        arguments_of(options)


def test_a_default_of_kvlooms_that_the_version_lacks_is_left_out():
    """Nobody has asked for it."""
    variant = Variant(without_llm_arguments=("enable_chunked_prefill",))
    assert "enable_chunked_prefill" not in of_config(TensorRtLlmConfig(), variant)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("tensor_parallel_size = 2", r"It is now options\.tensor_parallel_size\."),
        ("attention_dp = true", r"It is now options\.enable_attention_dp\."),
        ("kv_cache = { dtype = 'fp8' }", r"It is now options\.kv_cache_config, with the library's names"),
        ("lora = { enabled = true }", r"It is now options\.lora_config, .*; adapters is beside options\."),
        ("penalties = true", r"It is gone: what the sampler applies is known"),
        ("extra_llm_options = {}", r"Its keys are now those of options\."),
    ],
)
def test_a_former_key_says_where_it_went(key: str, message: str, tmp_path: Path):
    """An operator who updates kvloom must not have to look for each of them."""
    path = tmp_path / "kvloom.toml"
    path.write_text(f"[shard.tensorrt_llm]\n{key}\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path)


# -- speculation ------------------------------------------------------------------------------------------------------


def speculating(decoding_type: str, release: LibraryRelease = RELEASE_1_2, **given: Any) -> Any:
    options = {"decoding_type": decoding_type, "max_draft_len": 2, **given}
    return arguments_of({"speculative_config": options}, release)


@BOTH
def test_no_pool_of_ngrams_is_shared_between_tenants(release: LibraryRelease):
    """The library's default is one for all."""
    arguments = speculating("NGram", release, max_draft_len=6, max_matching_ngram_size=3)
    speculation = arguments["speculative_config"]
    assert speculation.is_public_pool is False
    assert (speculation.max_draft_len, speculation.max_matching_ngram_size) == (6, 3)
    assert arguments["disable_overlap_scheduler"] is True
    if release is NEWEST:
        assert speculating("SA", release)["speculative_config"].enable_global_pool is False


@pytest.mark.parametrize(("release", "name"), [(RELEASE_1_2, "EagleDecodingConfig"), (NEWEST, "Eagle3DecodingConfig")])
@pytest.mark.parametrize("field", ["speculative_model", "speculative_model_dir"])
def test_eagle_is_named_as_the_version_names_it(release: LibraryRelease, name: str, field: str):
    """Newer versions have a class of its own. Both have two names for the draft model."""
    speculation = speculating("Eagle3", release, **{field: "/models/eagle"})["speculative_config"]
    assert type(speculation).__name__ == name
    assert speculation.speculative_model == "/models/eagle"


@pytest.mark.parametrize("decoding_type", ["Eagle3", "MTP", "Draft_Target"])
def test_speculation_must_not_make_sampled_answers_greedy(decoding_type: str):
    """In 1.2.1 a flag allows sampling; in newer versions it has no effect, and a warning in the log for every start."""
    given = {"speculative_model": "/models/draft"}
    assert speculating(decoding_type, **given)["speculative_config"].allow_advanced_sampling is True
    newest = speculating(decoding_type, NEWEST, **given)["speculative_config"]
    assert newest.allow_advanced_sampling is False


@pytest.mark.parametrize("decoding_type", ["PARD", "SA"])
def test_newer_modes_are_had_by_name(decoding_type: str):
    """And refused by name where the version has none."""
    found = speculating(decoding_type, NEWEST, speculative_model="/models/draft")["speculative_config"]
    assert found.decoding_type == decoding_type
    with pytest.raises(EngineError, match=rf"1\.2\.1 has no decoding_type {decoding_type}"):
        speculating(decoding_type)


def test_half_a_speculation_is_refused():
    """The library would say so minutes later."""
    with pytest.raises(EngineError, match="needs a decoding_type"):
        arguments_of({"speculative_config": {"max_draft_len": 2}})
    with pytest.raises(EngineError, match=r"speculative_config: .*speculative_model must be specified"):
        speculating("Draft_Target")


@pytest.mark.parametrize("decoding_type", ["", "NGram", "Eagle3", "MTP", "Draft_Target"])
@BOTH
def test_the_overlap_scheduler_is_off_only_where_drafts_need_it(release: LibraryRelease, decoding_type: str):
    """Off costs speed; on, n-grams have nothing to draft from. The newest draft_target is part of the model."""
    given = {"speculative_model": "draft"}
    arguments = speculating(decoding_type, release, **given) if decoding_type else arguments_of({}, release)
    is_off = decoding_type == "NGram" or (decoding_type == "Draft_Target" and release is RELEASE_1_2)
    assert arguments.get("disable_overlap_scheduler", False) is is_off


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"sampler_type": "TRTLLMSampler"}, "sampler_type"), ({"pipeline_parallel_size": 2}, "speculative_config")],
)
def test_what_excludes_speculation_is_refused_by_name(changes: dict[str, Any], key: str):
    """The library says so minutes later, or samples otherwise."""
    with pytest.raises(EngineError, match=rf"shard\.tensorrt_llm\.options\.{key}"):
        arguments_of({"speculative_config": {"decoding_type": "NGram", "max_draft_len": 2}, **changes})


# -- roles, tiers and the rest ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode", "both", ""])
@BOTH
def test_a_shard_that_computes_prompts_for_others_schedules_serially(release: LibraryRelease, role: str):
    """In 1.2.1 its first prompt would end the engine otherwise; newer versions do not need it."""
    needed = release is RELEASE_1_2 and role in ("prefill", "both")
    assert arguments_of({}, release, role=role).get("disable_overlap_scheduler", False) is needed
    assert arguments_of({"disable_overlap_scheduler": True}, release, role=role)["disable_overlap_scheduler"] is True
    if needed:
        with pytest.raises(EngineError, match=r"options\.disable_overlap_scheduler: .*shard\.role"):
            arguments_of({"disable_overlap_scheduler": False}, release, role=role)


def test_a_tier_on_disk_has_a_directory_and_the_manager_that_knows_it(tmp_path: Path):
    """With a size alone the newest versions do not start, and with the old manager the tier is never used."""
    cache = {"disk_cache_size": 2**30, "disk_cache_path": str(tmp_path), "use_kv_cache_manager_v2": True}
    assert arguments_of({"kv_cache_config": cache}, NEWEST)["kv_cache_config"].disk_cache_path == str(tmp_path)
    with pytest.raises(EngineError, match=r"disk_cache_path must be set"):
        arguments_of({"kv_cache_config": cache | {"disk_cache_path": None}}, NEWEST)
    with pytest.raises(EngineError, match=r"disk_cache_size needs use_kv_cache_manager_v2"):
        arguments_of({"kv_cache_config": cache | {"use_kv_cache_manager_v2": False}}, NEWEST)
    with pytest.raises(EngineError, match=r"KvCacheConfig has no disk_cache"):
        arguments_of({"kv_cache_config": cache})


@pytest.mark.parametrize("backend", ["DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"])
@BOTH
def test_a_transceiver_is_one_that_the_version_has(release: LibraryRelease, backend: str):
    """The library would find out after it has loaded the weights."""
    options = {"cache_transceiver_config": {"backend": backend}}
    if backend == "MOONCAKE" and release is RELEASE_1_2:
        with pytest.raises(EngineError, match=r"options\.cache_transceiver_config\.backend.*MOONCAKE"):
            arguments_of(options, release)
    else:
        assert arguments_of(options, release)["cache_transceiver_config"].backend == backend


def test_the_priority_queue_is_an_option_of_newer_versions():
    """1.2.1 refuses it by name, as above."""
    options = {"scheduler_config": {"waiting_queue_policy": "priority"}}
    assert arguments_of(options, NEWEST)["scheduler_config"].waiting_queue_policy == "priority"
    assert "scheduler_config" not in arguments_of({}, NEWEST)


@BOTH
def test_adapters_need_modules_or_one_to_take_them_from(release: LibraryRelease):
    """Without either the library's executor dies of an assertion, long after the start has begun."""
    with pytest.raises(EngineError, match="lora_target_modules"):
        arguments_of({"enable_lora": True}, release)
    arguments = of_config(TensorRtLlmConfig(adapters={"b": "/b", "a": "/a"}), Variant(release=release))
    assert arguments["enable_lora"] is True
    assert arguments["lora_config"].lora_dir == ["/a"]


def test_another_order_of_the_queue_is_not_to_be_had():
    """It is the library that admits."""
    with pytest.raises(EngineError, match=r"shard\.queue_order"):
        arguments_of(queue_order="shortest_prefill")


def test_kv_events_are_never_pushed_as_well():
    """The library's getter then returns nothing, and the shard would see an empty cache."""
    assert arguments_of({}, NEWEST)["kv_cache_config"].kv_events_config is None


def test_the_index_stub_is_recognised():
    """`pip install tensorrt-llm` gives it where there is no NVIDIA driver."""
    with installed_tensorrt_llm(Variant(is_stub=True)), pytest.raises(EngineError, match="stub"):
        load_tensorrt_llm()


def test_a_missing_library_is_an_engine_error():
    """The shard says so in one line and stays out of the fleet."""
    with pytest.raises(EngineError, match="cannot be imported"):
        load_tensorrt_llm()
