"""The configuration of who may call: API keys, plugins, the control service, OIDC providers, certificates and TLS.

The configuration of what the fabric stores for its callers: responses, conversations, files, vector stores and
batches.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from kvloom_common.config.section import (
    AT_START,
    BY_CONTROL,
    BY_EDGES,
    BY_ROUTERS_AND_EDGES,
    FOLLOWED,
    DatabaseUrl,
    FilePath,
    Flag,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
    always,
)
from kvloom_common.kv_share import MAX_KV_SHARES_PERCENT

_WEBHOOK: Final = re.compile(r"https?://[^\s/?#@]+(/[^\s#]*)?")


class CallersConfig(Section):
    """Who may call, and who counts as one caller. Callers share neither cached prompts nor names of requests."""

    moved = always(provider_timeout_seconds="5")

    api_keys_file: Annotated[
        FilePath, Flag("api-keys", "The file with the hashes of API keys (`kvloom keys`). Clients then need a key.")
    ] = ""
    """The file with the hashes of API keys (`kvloom keys`), reloaded when it changes. Empty: no key is needed."""
    provider: str = ""
    """The name of a plugin that says who a caller is (docs/how-to/plugins.md), instead of API keys. Empty: there is
    none."""
    plugin: dict[str, Any] = {}
    """The settings of that plugin, which only it knows and checks."""
    provider_cache_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """How long the provider's answers are kept: a caller who loses access has it for at most that long. Refusals are
    kept for 5 seconds at most."""
    kv_shares: dict[str, Annotated[int, Meta(ge=1)]] = {}
    """The part of every shard's KV blocks, in percent, that is guaranteed to a caller (docs/operate/kv-shares.md), by
    the caller's name: "key-NAME" for an API key, "id-ID" for an id of the provider. At most 90 together. With tenants,
    limits of accounts say this instead."""
    allow_insecure: Annotated[
        bool, Flag("insecure", "Listen on other addresses than loopback even without TLS or API keys.")
    ] = False
    """True allows edges and routers to listen on other addresses than loopback without TLS or without API keys or a
    provider."""
    max_concurrent_requests: Annotated[PositiveInt, BY_ROUTERS_AND_EDGES] = 4096
    """Running requests of one caller at an edge (docs/reference/http-api.md), and RPCs at a router. Beyond that it gets
    a 429 or RESOURCE_EXHAUSTED, while the others are served."""
    max_connections: Annotated[PositiveInt, BY_ROUTERS_AND_EDGES] = 16_384
    """Connections open at a time at an edge, and gRPC connections at a router. Further ones get a 503 and are
    closed."""
    max_connections_per_address: Annotated[PositiveInt, BY_ROUTERS_AND_EDGES] = 8192
    """Those of one IPv4 address or one IPv6 network of 64 bits. Further ones get a 429 or RESOURCE_EXHAUSTED and are
    closed. `edge.trusted_proxies` may have any number."""
    anonymous: Literal["address", "shared"] = "address"
    """Requests without an Authorization header. address: each IP address is a caller. shared: they are all one
    caller's, so that they share cached prompts and can find out which prompts others have sent."""

    def __post_init__(self) -> None:
        if (total := sum(self.kv_shares.values())) > MAX_KV_SHARES_PERCENT:
            raise ValueError(f"kv_shares guarantees {total}% together, and at most {MAX_KV_SHARES_PERCENT}% can be")


TenantId = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}/[a-z0-9-]{1,64}$")]
"""ORGANISATION/PROJECT"""


TokenAlgorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"
]
"""Those whose keys can be published."""


RoleName = Literal["reader", "member", "operator", "admin"]


class IssuerConfig(Section):
    """An OIDC provider whose tokens (JWTs) are accepted like keys (docs/operate/tenancy.md)."""

    moved = always(leeway_seconds="30", refresh_seconds="300", min_refetch_seconds="10")

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
    """The ids of the issuer's subjects begin with it: `oidc:NAME:SUBJECT`."""
    issuer: Annotated[str, Meta(min_length=1, max_length=512)]
    """The `iss` of its tokens, exactly."""
    audiences: Annotated[list[str], Meta(min_length=1, max_length=16)]
    """One of them must be in a token's `aud`."""
    jwks_url: str = ""
    """Where it publishes its keys: an https URL, or an http one of this machine."""
    jwks_file: FilePath = ""
    """A file with its keys, instead of `jwks_url`."""
    algorithms: Annotated[list[TokenAlgorithm], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: list[TokenAlgorithm](("RS256", "ES256"))
    )
    """Those that its tokens may be signed with."""
    tenant_claim: str = "tenant"
    """The claim that says to which tenant a token belongs: a text, or a list of texts (groups)."""
    tenants: dict[str, TenantId] = {}
    """The tenants by the values of that claim; the first one here that a token has counts. Empty: the value itself is a
    tenant, so the issuer may name any of them."""
    role_claim: str = "roles"
    """The claim that says which role the token has: a text, or a list of texts."""
    roles: dict[str, RoleName] = {}
    """The roles by the values of that claim; the highest that a token has counts."""
    default_role: RoleName | Literal[""] = "member"
    """The role of tokens that have none of `roles`. "": they are refused."""

    def __post_init__(self) -> None:
        if bool(self.jwks_url) == bool(self.jwks_file):
            raise ValueError("one of jwks_url and jwks_file is needed")


class CertificateConfig(Section):
    """Clients' certificates (`tls.client_ca_file`) that are accepted like keys. A client with a key needs none of
    these."""

    tenant: TenantId
    uri: str = ""
    """A URI of the certificate, such as a SPIFFE id; with "*" at its end, all that begin so."""
    common_name: str = ""
    """The common name of the certificate's subject, instead of `uri`."""
    role: RoleName = "member"

    def __post_init__(self) -> None:
        if bool(self.uri.strip("*")) == bool(self.common_name):
            raise ValueError("one of uri and common_name is needed")


class ControlConfig(Section):
    """The control service: tenants with keys, limits, budgets and metering (docs/operate/tenancy.md)."""

    moved = dict.fromkeys(
        ("max_keys", "max_projects", "max_users", "max_entry_bytes"),
        "Delete the line, and give organisations quotas: kvloom orgs update ID --quota NAME=NUMBER",
    )
    enabled: Annotated[
        bool,
        AT_START,
        Flag(
            "control",
            "Serve tenants: holders of the keys that `kvloom keys create` makes, and nobody else "
            "(docs/operate/tenancy.md).",
        ),
    ] = False
    """True gives the fabric tenants. Then only holders of their keys are served."""
    host: Annotated[str, AT_START] = "127.0.0.1"
    port: Annotated[Port, AT_START] = 0
    """Where the service listens for the processes of its fabric. 0: the system picks the port."""
    database_url: Annotated[DatabaseUrl, BY_CONTROL] = ""
    """"postgresql://USER@HOST/NAME", or "sqlite:///PATH". Empty: a SQLite file in the data directory."""
    max_stale_seconds: PositiveFloat = 86_400.0
    """How long edges and routers serve with the table of tenants that they have while the service cannot be reached."""
    usage_record_days: Annotated[int, Meta(ge=0, le=36_500), BY_CONTROL] = 400
    """How long the record of each request is kept; sums by day, model and key stay. 0: for ever."""
    budget_alert_percents: Annotated[list[Annotated[int, Meta(ge=1, le=1000)]], Meta(max_length=16), BY_CONTROL] = (
        msgspec.field(default_factory=lambda: [80, 100])
    )
    """Notices are sent when so much of a budget is spent."""
    webhook_urls: Annotated[list[str], Meta(max_length=16), BY_CONTROL] = []
    """Where notices about budgets are sent."""
    webhook_secret_file: Annotated[FilePath, BY_CONTROL] = ""
    """The file with the secret with which notices are signed ("whsec_...", see standardwebhooks.com)."""
    witness: Annotated[bool, BY_EDGES] = False
    """True makes edges write down what they have delivered, and routers what they have sent to clients outside the
    fabric, for `kvloom usage reconcile`."""
    operator_organisation: Annotated[str, FOLLOWED] = ""
    """The organisation whose keys with the scope admin administer the whole fabric over HTTP, as the commands on its
    machines do. Empty: such keys administer their own organisations only."""
    issuers: Annotated[list[IssuerConfig], Meta(max_length=16)] = []
    """OIDC providers whose tokens are accepted like keys."""
    certificates: Annotated[list[CertificateConfig], Meta(max_length=1024)] = []
    """Clients' certificates that are accepted like keys; the first that fits counts."""

    def __post_init__(self) -> None:
        for url in self.webhook_urls:
            if not _WEBHOOK.fullmatch(url):
                raise ValueError(f"{url!r} is not a URL such as https://example.com/budgets")
        if self.webhook_urls and not self.webhook_secret_file:
            raise ValueError("webhook_urls needs webhook_secret_file")


class TlsConfig(Section):
    """TLS for clients, on the HTTP and the gRPC port. The files are in PEM and are reloaded when they change."""

    certificate_file: Annotated[
        FilePath,
        AT_START,
        Flag(
            "tls-certificate",
            "The certificate of the HTTP and gRPC ports, in PEM. It is reloaded when the file changes.",
        ),
    ] = ""
    """The server's certificate, and the intermediate ones. Empty: no TLS."""
    key_file: Annotated[FilePath, AT_START, Flag("tls-key", "The key of that certificate.")] = ""
    client_ca_file: Annotated[
        FilePath, Flag("tls-client-ca", "The authorities of clients' certificates, which clients then need.")
    ] = ""
    """The authorities of clients' certificates. Empty: clients need none."""
    client_crl_file: FilePath = ""
    """Lists of the certificates that these authorities have revoked. Empty: none are."""

    def __post_init__(self) -> None:
        if bool(self.certificate_file) != bool(self.key_file):
            raise ValueError("certificate_file and key_file are needed together")
        if self.client_ca_file and not self.certificate_file:
            raise ValueError("client_ca_file needs certificate_file")
        if self.client_crl_file and not self.client_ca_file:
            raise ValueError("client_crl_file needs client_ca_file")


class OrchestratorConfig(Section):
    """The orchestrator: stored responses, conversations, files and batches (docs/how-to/stored-state.md)."""

    enabled: Annotated[
        bool,
        AT_START,
        Flag("orchestrator", "Store responses, conversations, files and batches (docs/how-to/stored-state.md)."),
    ] = False
    """True starts an orchestrator. Responses are then stored unless a request says `store: false`."""
    host: Annotated[str, AT_START] = "127.0.0.1"
    port: Annotated[Port, AT_START] = 0
    """Where it listens for the processes of its fabric. 0: the system picks the port."""
    database_url: DatabaseUrl = ""
    """"postgresql://USER@HOST/NAME", or "sqlite:///PATH". Empty: a SQLite file in the data directory."""
    files_url: str = ""
    """Where the contents of files are: "s3://BUCKET/PREFIX", with the credentials of the environment. Empty: the data
    directory."""
    max_file_bytes: PositiveInt = 512 * 2**20
    max_files: PositiveInt = 10_000
    """How large a file may be, and how many a tenant may have."""
    max_vector_stores: PositiveInt = 1000
    """How many vector stores a tenant may have. Each has at most `max_files` files."""
    hot_conversation_seconds: NonNegativeInt = 0
    """How long Redis has copies of conversations after their last turn, encrypted with keys that only the database has.
    A turn then reads from the database only what is new, which pays where that is farther away than Redis, or busy. 0:
    there are no copies, and each turn reads its whole conversation from the database."""
    rerank_model: str = ""
    """A model of the fabric by which searches in vector stores rank again what they have found (`POST /v1/rerank`), on
    behalf of the tenant, which must be allowed to use it. Empty: they do not."""
    rerank_seconds: PositiveFloat = 1.0
    """How long a search waits for that model. Without an answer the ranking stays as it is."""
    batch_concurrency: PositiveInt = 16
    """How many lines of a batch are answered at a time."""
    max_background: PositiveInt = 1000
    """How many background responses of a tenant may be queued or in progress."""
    response_days: Annotated[int, Meta(ge=1, le=36_500)] = 30
    """How long responses and chat completions are kept that no conversation has."""
    deleted_days: Annotated[int, Meta(ge=1, le=36_500)] = 30
    """How long a deleted conversation can be restored (`DELETE /kvloom/v1/conversations/{id}`)."""
    retention_days: Annotated[int, Meta(ge=0, le=36_500)] = 0
    """How long contents are kept at most: responses, conversations, files and batches, counted from when they were
    made. A tenant may want less (`POST /kvloom/v1/retention`). 0: tenants decide alone."""
    webhook_private_hosts: Annotated[list[str], Meta(max_length=64)] = []
    """"HOST" or "HOST:PORT": what webhooks may call although it has no public address, also by http. All others are
    called by https at public addresses."""
    max_items: PositiveInt = 10_000
    """How many items a conversation may have, and how many the responses before another one together."""
