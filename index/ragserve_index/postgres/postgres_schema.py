"""The registry's tables in Postgres: those of ``sqlite_schema``, which explains them, and a few more.

Text is compared by code point (``COLLATE "C"``), whatever the database's locale."""

from __future__ import annotations

FORMAT = 4

_TEXT = 'TEXT COLLATE "C"'
_ID = "BIGINT GENERATED ALWAYS AS IDENTITY"

_WORDS = f"CREATE TABLE lexical_words (version {_TEXT} NOT NULL);"
_SETTINGS = f"""
CREATE TABLE IF NOT EXISTS namespace_settings (
  namespace_id BIGINT PRIMARY KEY REFERENCES namespaces(id) ON DELETE CASCADE, data {_TEXT} NOT NULL
);
"""
_CORRECTIONS = f"""
CREATE TABLE corrections (
  id {_ID} PRIMARY KEY, namespace_id BIGINT NOT NULL REFERENCES namespaces(id) ON DELETE CASCADE,
  doc_id {_TEXT} NOT NULL, ordinal INTEGER NOT NULL, start BIGINT NOT NULL, "end" BIGINT NOT NULL,
  page INTEGER, original {_TEXT} NOT NULL, original_tokens INTEGER NOT NULL, text {_TEXT} NOT NULL,
  n_tokens INTEGER NOT NULL, disabled INTEGER NOT NULL, vector BYTEA NOT NULL, sentences BYTEA,
  lost_at DOUBLE PRECISION
);
CREATE INDEX corrections_by_document ON corrections (namespace_id, doc_id);
"""
_EDITED = "ALTER TABLE chunks ADD COLUMN edited INTEGER NOT NULL DEFAULT 0;"

_LABELS = f"""
ALTER TABLE documents ADD COLUMN labels {_TEXT} NOT NULL DEFAULT '[]';
CREATE INDEX documents_by_labels ON documents (namespace_id, labels);
"""

TABLES = f"""
CREATE TABLE ragserve_registry (format INTEGER NOT NULL);

-- The last chunk id ever used: ids must not return after a rollback of others, so no sequence.
CREATE TABLE last_chunk (chunk_id BIGINT NOT NULL);
INSERT INTO last_chunk VALUES (0);

CREATE TABLE namespaces (
  id {_ID} PRIMARY KEY, name {_TEXT} NOT NULL UNIQUE, embedder {_TEXT} NOT NULL,
  dim INTEGER NOT NULL, index_type {_TEXT} NOT NULL, version BIGINT NOT NULL DEFAULT 0,
  changed BIGINT NOT NULL DEFAULT 0, n_documents BIGINT NOT NULL DEFAULT 0,
  n_chunks BIGINT NOT NULL DEFAULT 0, n_tokens BIGINT NOT NULL DEFAULT 0,
  created_at DOUBLE PRECISION NOT NULL, uid {_TEXT} NOT NULL, log_floor BIGINT NOT NULL DEFAULT 0
);

CREATE TABLE versions (
  namespace_id BIGINT NOT NULL REFERENCES namespaces(id) ON DELETE CASCADE, version BIGINT NOT NULL,
  stamp BIGINT NOT NULL, PRIMARY KEY (namespace_id, version)
);

CREATE TABLE removals (
  namespace_id BIGINT NOT NULL REFERENCES namespaces(id) ON DELETE CASCADE, version BIGINT NOT NULL,
  first_id BIGINT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (namespace_id, version, first_id)
);

-- fields: the metadata again, for filters. jsonb rewrites numbers, so metadata itself is text.
CREATE TABLE documents (
  id {_ID} PRIMARY KEY, namespace_id BIGINT NOT NULL REFERENCES namespaces(id) ON DELETE CASCADE,
  doc_id {_TEXT} NOT NULL, source {_TEXT} NOT NULL, title {_TEXT} NOT NULL, content_hash {_TEXT} NOT NULL,
  mime {_TEXT} NOT NULL, size_bytes BIGINT NOT NULL,
  first_id BIGINT NOT NULL, n_chunks INTEGER NOT NULL, n_tokens BIGINT NOT NULL,
  created_at DOUBLE PRECISION NOT NULL, updated_at DOUBLE PRECISION NOT NULL, metadata {_TEXT} NOT NULL,
  fields JSONB GENERATED ALWAYS AS (metadata::jsonb) STORED,
  UNIQUE (namespace_id, doc_id)
);

CREATE TABLE chunks (
  chunk_id BIGINT PRIMARY KEY,
  document BIGINT NOT NULL REFERENCES documents(id) ON DELETE CASCADE, ordinal INTEGER NOT NULL,
  start BIGINT NOT NULL, "end" BIGINT NOT NULL, page INTEGER, n_tokens INTEGER NOT NULL,
  text {_TEXT} NOT NULL, edited INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX chunks_by_document ON chunks (document);

CREATE TABLE vectors (
  first_id BIGINT PRIMARY KEY, namespace_id BIGINT NOT NULL, version BIGINT NOT NULL, n INTEGER NOT NULL,
  document BIGINT NOT NULL REFERENCES documents(id) ON DELETE CASCADE, data BYTEA NOT NULL
);
ALTER TABLE vectors ALTER COLUMN data SET STORAGE EXTERNAL; -- floats do not compress
CREATE INDEX vectors_by_version ON vectors (namespace_id, version);
CREATE INDEX vectors_by_document ON vectors (document);

CREATE TABLE jobs (
  rowid {_ID}, job_id {_TEXT} PRIMARY KEY, namespace {_TEXT} NOT NULL, state {_TEXT} NOT NULL,
  spec {_TEXT} NOT NULL, error {_TEXT}, cancel_requested INTEGER NOT NULL DEFAULT 0, worker {_TEXT},
  lease_until DOUBLE PRECISION, created_at DOUBLE PRECISION NOT NULL, updated_at DOUBLE PRECISION NOT NULL
);
CREATE INDEX jobs_by_state ON jobs (state, created_at);

CREATE TABLE job_items (
  item {_ID} PRIMARY KEY, job_id {_TEXT} NOT NULL REFERENCES jobs(job_id) ON DELETE CASCADE,
  source {_TEXT} NOT NULL, state {_TEXT} NOT NULL DEFAULT 'pending', reason {_TEXT},
  chunks BIGINT NOT NULL DEFAULT 0, tokens BIGINT NOT NULL DEFAULT 0,
  size_bytes BIGINT NOT NULL DEFAULT 0, doc_id {_TEXT}
);
-- a source may be longer than an index entry
CREATE UNIQUE INDEX job_items_by_source ON job_items (job_id, md5(source));
CREATE INDEX job_items_by_state ON job_items (job_id, state);

CREATE TABLE evictions (
  id {_ID} PRIMARY KEY, namespace {_TEXT} NOT NULL, doc_id {_TEXT}, title {_TEXT} NOT NULL, text {_TEXT},
  created_at DOUBLE PRECISION NOT NULL
);
CREATE INDEX evictions_by_document ON evictions (namespace, doc_id);

CREATE TABLE sentences (
  chunk_id BIGINT PRIMARY KEY REFERENCES chunks(chunk_id) ON DELETE CASCADE, data BYTEA NOT NULL
);

-- Words of each namespace's lexical index together (full_text.py), for the average length of BM25.
CREATE TABLE lexical_sizes (
  namespace_id BIGINT PRIMARY KEY REFERENCES namespaces(id) ON DELETE CASCADE, n_words BIGINT NOT NULL
);
{_WORDS}{_SETTINGS}{_CORRECTIONS}{_LABELS}"""

_OUR_STEMMER = """
DROP TEXT SEARCH CONFIGURATION IF EXISTS ragserve;
DROP TEXT SEARCH DICTIONARY IF EXISTS ragserve_stem;
"""
MIGRATIONS = {1: _OUR_STEMMER + _WORDS, 2: _SETTINGS, 3: _CORRECTIONS + _EDITED + _LABELS}
"""The statements that bring a registry from one format to the next, in one transaction."""
