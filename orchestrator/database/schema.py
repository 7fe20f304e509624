"""The tables of stored objects. Times are seconds since 1970; JSON is stored as its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import sqlalchemy as sa

MIGRATIONS: Final = Path(__file__).parent / "migrations"

metadata = sa.MetaData()

# Responses, conversations and all other objects that a caller may list or name. `body` is the object's JSON without
# what other tables have. `parent`: of a response, the one before it. `label`: what lists filter by.
objects = sa.Table(
    "objects",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, index=True),
    sa.Column("parent", sa.Text, nullable=False, server_default=""),
    sa.Column("label", sa.Text, nullable=False, server_default=""),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("ix_objects_list", "tenant", "kind", "created_at", "id"),
)

# The items of a conversation, and the input and the output of a response, in order.
items = sa.Table(
    "items",
    metadata,
    sa.Column("parent", sa.Text, primary_key=True),
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("is_output", sa.Boolean, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("ix_items_id", "tenant", "id"),
)

# The keys with which copies of the items of conversations are encrypted (orchestrator/store/hot_items.py).
hot_keys = sa.Table(
    "hot_keys",
    metadata,
    sa.Column("conversation", sa.Text, primary_key=True),
    sa.Column("key", sa.LargeBinary, nullable=False),
)

# The work that one orchestrator at a time does: `holder`, until `held_until`. The id is that of a batch, of a
# background response, of a delivery or of a file of a vector store ("STORE/FILE"), as `kind` says. When it is over, the
# row is deleted.
jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("held_until", sa.Double, nullable=False),
    sa.Column("kind", sa.Text, nullable=False, server_default="batch"),
)

# What a background response that has not ended is generated from: the body of its request, and the seed. Its first
# `num_sent` events, whose digest is `sent_digest`, may have been sent to a client.
runs = sa.Table(
    "runs",
    metadata,
    sa.Column("response", sa.Text, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("priority_class", sa.Text, nullable=False),
    sa.Column("conversation", sa.Text, nullable=False),
    sa.Column("num_sent", sa.BigInteger, nullable=False),
    sa.Column("sent_digest", sa.LargeBinary, nullable=False),
)

# The events of a background response that has ended, compressed.
response_events = sa.Table(
    "response_events",
    metadata,
    sa.Column("response", sa.Text, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

# The webhooks that are still to be sent: `event` is what receivers tell repetitions apart by, `body` what is sent. Each
# has a job of the same id, whose `held_until` says when it is sent.
deliveries = sa.Table(
    "deliveries",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False, index=True),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("num_tries", sa.BigInteger, nullable=False),
)

# The lines of batches that are not over: where they are in the input file, and how they have ended. They are answered
# in the order of `turn`. `state`: "open", "completed" or "failed". `result`: the line of the output or of the error
# file.
batch_lines = sa.Table(
    "batch_lines",
    metadata,
    sa.Column("batch", sa.Text, primary_key=True),
    sa.Column("line", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("custom_id", sa.Text, nullable=False),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("result", sa.LargeBinary),
    sa.Column("turn", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("ix_batch_lines_state", "batch", "state", "line"),
    sa.Index("ix_batch_lines_turn", "batch", "state", "turn", "line"),
)

# What changes of a vector store without its owner: `revision` whenever its files are not those that an index of them
# has, `active_at` when it is searched. The rest of it is in `objects`.
vector_stores = sa.Table(
    "vector_stores",
    metadata,
    sa.Column("store", sa.Text, primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("active_at", sa.Double, nullable=False),
)

# The files of vector stores. `batch`: the file batch by which one was added. `version`: the store's revision when its
# chunks were complete, or its attributes changed. `body`: what is shown of it, and how it is cut.
store_files = sa.Table(
    "store_files",
    metadata,
    sa.Column("store", sa.Text, primary_key=True),
    sa.Column("file", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("batch", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("usage_bytes", sa.BigInteger, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("ix_store_files_list", "store", "created_at", "file"),
    sa.Index("ix_store_files_file", "file"),
)

# The chunks of these files, in order, by a number that no other chunk has: a text, and its vector as little-endian
# float32.
store_chunks = sa.Table(
    "store_chunks",
    metadata,
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("store", sa.Text, nullable=False),
    sa.Column("file", sa.Text, nullable=False),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("vector", sa.LargeBinary, nullable=False),
    sa.Index("ix_store_chunks_place", "store", "file", "position"),
    sqlite_autoincrement=True,
)
