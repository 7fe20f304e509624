"""The configuration of all processes: one typed tree, read from a TOML (or JSON) file.

    config = load_config(Path("kvloom.toml"))

Unknown keys and wrong types are errors that name the key. `tools` applies command-line flags and environment variables
(`KVLOOM_...`) on top; the services get the result as one file. docs/reference/configuration.md derives from these
modules.

section.py       what is said of a key: its type, its readers, its flag, its path
keys.py          all keys with what is said of them
tree.py          the whole tree, and its small sections
models.py        models and adapters
routes.py        routes among models, shadow traffic
edge.py          the edges
fabric.py        what processes have in common, resumable streams
router.py        the routers
brownout.py      the brownout ladder
shard.py         the shards, the simulated and the torch engine
tensorrt_llm.py  TensorRT-LLM
tenants.py       who may call
file.py          reading and writing files
"""

from kvloom_common.config.brownout import BrownoutConfig, BrownoutStepConfig, TierName
from kvloom_common.config.edge import CellConfig, EdgeConfig
from kvloom_common.config.fabric import FabricConfig, ResumeConfig
from kvloom_common.config.file import dump_config, load_config
from kvloom_common.config.models import ADAPTER_NAME, AdapterConfig, AdapterName, GenerationDefaults, ModelConfig
from kvloom_common.config.router import (
    DecisionLogConfig,
    DisaggregationConfig,
    FairnessConfig,
    HealthConfig,
    OverloadConfig,
    PlacementConfig,
    PriorityClassConfig,
    ReceiptsConfig,
    ResultCacheConfig,
    RouterConfig,
)
from kvloom_common.config.routes import CascadeConfig, Language, RouteConfig, RouteRule, RouteTarget, ShadowConfig
from kvloom_common.config.section import (
    Address,
    ConfigError,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
    with_constants,
)
from kvloom_common.config.shard import (
    SMALL_MACHINE_CORES,
    ShardConfig,
    SimConfig,
    SpeculationConfig,
    TorchConfig,
    num_cores,
)
from kvloom_common.config.tenants import (
    CallersConfig,
    CertificateConfig,
    ControlConfig,
    IssuerConfig,
    OrchestratorConfig,
    RoleName,
    TenantId,
    TlsConfig,
    TokenAlgorithm,
)
from kvloom_common.config.tensorrt_llm import TensorRtLlmConfig
from kvloom_common.config.tree import KvloomConfig, LogConfig, MetricsConfig, RedisConfig, SafetyConfig, TracingConfig

__all__ = [
    "ADAPTER_NAME",
    "SMALL_MACHINE_CORES",
    "AdapterConfig",
    "AdapterName",
    "Address",
    "BrownoutConfig",
    "BrownoutStepConfig",
    "CallersConfig",
    "CascadeConfig",
    "CellConfig",
    "CertificateConfig",
    "ConfigError",
    "ControlConfig",
    "DecisionLogConfig",
    "DisaggregationConfig",
    "EdgeConfig",
    "FabricConfig",
    "FairnessConfig",
    "GenerationDefaults",
    "HealthConfig",
    "IssuerConfig",
    "KvloomConfig",
    "Language",
    "LogConfig",
    "MetricsConfig",
    "ModelConfig",
    "NonNegativeInt",
    "OrchestratorConfig",
    "OverloadConfig",
    "PlacementConfig",
    "Port",
    "PositiveFloat",
    "PositiveInt",
    "PriorityClassConfig",
    "ReceiptsConfig",
    "RedisConfig",
    "ResultCacheConfig",
    "ResumeConfig",
    "RoleName",
    "RouteConfig",
    "RouteRule",
    "RouteTarget",
    "RouterConfig",
    "SafetyConfig",
    "Section",
    "ShadowConfig",
    "ShardConfig",
    "SimConfig",
    "SpeculationConfig",
    "TenantId",
    "TensorRtLlmConfig",
    "TierName",
    "TlsConfig",
    "TokenAlgorithm",
    "TorchConfig",
    "TracingConfig",
    "dump_config",
    "load_config",
    "num_cores",
    "with_constants",
]
