"""The tables of the directory. Times are seconds since 1970, money is in billionths of the currency.

What processes replicate (organisations, projects, keys, prices) has a version: `table_state.version` goes up by one
with every transaction that changes some of it, and `changes` says what each version has changed.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

MAX_INTEGER: Final = 2**53 - 1
"""The largest number that the tables have: exact in JSON, too."""

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _counter() -> sa.types.TypeEngine[int]:
    """64 bits. SQLite only numbers rows by itself in a column of the type INTEGER."""
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


# Limits under a name, to which organisations, projects and keys refer.
limit_tiers = sa.Table(
    "limit_tiers",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("limits", sa.JSON, nullable=False),
)

# `limits`, here and below, has those that differ from the tier's. `operator_set` has what the operator of the fabric
# has set of a row that administrators may change, too (control/directory/operator_settings.py).
organisations = sa.Table(
    "organisations",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tier", sa.Text, sa.ForeignKey("limit_tiers.name"), index=True),
    sa.Column("limits", sa.JSON, nullable=False),
    sa.Column("priority_classes", sa.JSON, nullable=False, server_default="[]"),
    sa.Column("default_priority_class", sa.Text, nullable=False, server_default=""),
    sa.Column("disabled", sa.Boolean, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("quotas", sa.JSON, nullable=False, server_default="{}"),
    sa.Column("residency", sa.JSON, nullable=False, server_default="[]"),
)

# The tenants. The id is ORGANISATION/PROJECT.
projects = sa.Table(
    "projects",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("organisation", sa.Text, sa.ForeignKey("organisations.id"), nullable=False, index=True),
    sa.Column("tier", sa.Text, sa.ForeignKey("limit_tiers.name"), index=True),
    sa.Column("limits", sa.JSON, nullable=False),
    sa.Column("cache_scope", sa.Text, nullable=False),
    sa.Column("models", sa.JSON, nullable=False),
    sa.Column("priority_classes", sa.JSON, nullable=False, server_default="[]"),
    sa.Column("default_priority_class", sa.Text, nullable=False, server_default=""),
    sa.Column("operator_set", sa.JSON, nullable=False, server_default="{}"),
    sa.Column("disabled", sa.Boolean, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("residency", sa.JSON, nullable=False, server_default="[]"),
    sa.Column("guardrails", sa.JSON, nullable=False, server_default="[]"),
)

users = sa.Table(
    "users",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("disabled", sa.Boolean, nullable=False),
    sa.Column("operator_set", sa.JSON, nullable=False, server_default="{}"),
    sa.Column("created_at", sa.Double, nullable=False),
)

# Which role a user has in an organisation.
memberships = sa.Table(
    "memberships",
    metadata,
    sa.Column("organisation", sa.Text, sa.ForeignKey("organisations.id"), primary_key=True),
    sa.Column("user", sa.Text, sa.ForeignKey("users.id", ondelete="CASCADE"), primary_key=True, index=True),
    sa.Column("role", sa.Text, nullable=False),
)

# Of a key there are its SHA-256 and its first characters. Identities without a key have neither; their ids end in
# @ORGANISATION/PROJECT. `account`: of keys of which each has replaced the one before it, the id of the first one, whose
# limits it continues; empty: it is that one.
keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("digest", sa.LargeBinary, unique=True),
    sa.Column("prefix", sa.Text, nullable=False),
    sa.Column("project", sa.Text, sa.ForeignKey("projects.id"), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("user", sa.Text, index=True),
    sa.Column("scopes", sa.JSON, nullable=False),
    sa.Column("models", sa.JSON, nullable=False),
    sa.Column("priority_classes", sa.JSON, nullable=False, server_default="[]"),
    sa.Column("default_priority_class", sa.Text, nullable=False, server_default=""),
    sa.Column("tier", sa.Text, sa.ForeignKey("limit_tiers.name"), index=True),
    sa.Column("limits", sa.JSON, nullable=False),
    sa.Column("operator_set", sa.JSON, nullable=False, server_default="{}"),
    sa.Column("expires_at", sa.Double),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("last_used_at", sa.Double),
    sa.Column("revoked_at", sa.Double),
    sa.Column("account", sa.Text, nullable=False, server_default="", index=True),
)

# What was deleted. Usage, audit and caches know it by its id, so the id is never given to another one. `kind` is
# "organisation", "tenant" or "user"; `organisation` is the one that has used it, or empty.
used_ids = sa.Table(
    "used_ids",
    metadata,
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("organisation", sa.Text, nullable=False, index=True),
)

prices = sa.Table(
    "prices",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("effective_from", sa.Double, nullable=False),
    sa.Column("prompt_nanos", sa.BigInteger, nullable=False),
    sa.Column("cached_nanos", sa.BigInteger, nullable=False),
    sa.Column("output_nanos", sa.BigInteger, nullable=False),
    sa.Column("request_nanos", sa.BigInteger, nullable=False),
    sa.Column("batch_percent", sa.Integer, nullable=False),
    sa.Column("result_cache_percent", sa.Integer, nullable=False),
    sa.UniqueConstraint("model", "effective_from"),
)

# Who changed what. Rows are only ever added. `organisation` is empty for what concerns all of them.
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("number", _counter(), primary_key=True, autoincrement=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("target", sa.Text, nullable=False),
    sa.Column("organisation", sa.Text, nullable=False, index=True),
    sa.Column("before", sa.JSON(none_as_null=True)),
    sa.Column("after", sa.JSON(none_as_null=True)),
)

# One row. `changes` is complete for the versions above `oldest_version`.
table_state = sa.Table(
    "table_state",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("table_id", sa.Text, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("oldest_version", sa.BigInteger, nullable=False),
)

# What each version of the table has changed: an organisation, project or key, by its id, or the prices.
changes = sa.Table(
    "changes",
    metadata,
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("entry", sa.Text, primary_key=True),
)
