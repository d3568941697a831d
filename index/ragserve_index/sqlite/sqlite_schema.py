"""The registry's tables, with a comment on each. `sqlite_database` creates them, and
:mod:`ragserve_index.sqlite.fts5` one more for each namespace."""

from __future__ import annotations

APPLICATION_ID = 0x52475356  # "RGSV": tells our file from any other SQLite database
SCHEMA_VERSION = 7

_EVICTIONS = """-- Removed texts whose KV may still be cached; text NULL: a whole namespace. See evictions.py.
CREATE TABLE evictions (
  id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, doc_id TEXT, title TEXT NOT NULL, text TEXT,
  created_at REAL NOT NULL
);
CREATE INDEX evictions_by_document ON evictions (namespace, doc_id);
"""

_SENTENCES = """-- Embedded sentences of a chunk (sentence_vectors.py); chunks of older editions have none.
CREATE TABLE sentences (
  chunk_id INTEGER PRIMARY KEY REFERENCES chunks(chunk_id) ON DELETE CASCADE, data BLOB NOT NULL
);
"""

_WORDS = """-- How the words of the lexical indexes are cut: `VERSION` of word_cutting.py, in one row.
CREATE TABLE lexical_words (version TEXT NOT NULL);
"""

_SETTINGS = """-- A namespace's own settings as JSON (own_settings.py); those without any have no row.
CREATE TABLE IF NOT EXISTS namespace_settings (
  namespace_id INTEGER PRIMARY KEY REFERENCES namespaces(id) ON DELETE CASCADE, data TEXT NOT NULL
);
"""

_CORRECTIONS = """-- What people changed of chunks (corrections.py), by doc_id: the row of a document changes.
CREATE TABLE corrections (
  id INTEGER PRIMARY KEY, namespace_id INTEGER NOT NULL REFERENCES namespaces(id) ON DELETE CASCADE,
  doc_id TEXT NOT NULL, ordinal INTEGER NOT NULL, start INTEGER NOT NULL, "end" INTEGER NOT NULL,
  page INTEGER, original TEXT NOT NULL, original_tokens INTEGER NOT NULL, text TEXT NOT NULL,
  n_tokens INTEGER NOT NULL, disabled INTEGER NOT NULL, vector BLOB NOT NULL, sentences BLOB, lost_at REAL
);
CREATE INDEX corrections_by_document ON corrections (namespace_id, doc_id);
"""
_EDITED = "ALTER TABLE chunks ADD COLUMN edited INTEGER NOT NULL DEFAULT 0;\n"
_LABELS = """-- Labels as a JSON array, ascending (viewers.py): the index finds documents of equal ones.
ALTER TABLE documents ADD COLUMN labels TEXT NOT NULL DEFAULT '[]';
CREATE INDEX documents_by_labels ON documents (namespace_id, labels);
"""

TABLES = (
    """
-- version grows by one with each committed change of documents; changed counts vectors ever added or removed.
CREATE TABLE namespaces (
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, embedder TEXT NOT NULL,
  dim INTEGER NOT NULL, index_type TEXT NOT NULL, version INTEGER NOT NULL DEFAULT 0,
  changed INTEGER NOT NULL DEFAULT 0, n_documents INTEGER NOT NULL DEFAULT 0,
  n_chunks INTEGER NOT NULL DEFAULT 0, n_tokens INTEGER NOT NULL DEFAULT 0,
  created_at REAL NOT NULL, uid TEXT NOT NULL, log_floor INTEGER NOT NULL DEFAULT 0
);

-- A random stamp per version, which tells our index file from one of a registry restored from a backup.
CREATE TABLE versions (
  namespace_id INTEGER NOT NULL REFERENCES namespaces(id) ON DELETE CASCADE, version INTEGER NOT NULL,
  stamp INTEGER NOT NULL, PRIMARY KEY (namespace_id, version)
) WITHOUT ROWID;

-- The change log's deletions: chunks first_id .. first_id + n - 1 were removed in this version. Its additions
-- are the rows of vectors.
CREATE TABLE removals (
  namespace_id INTEGER NOT NULL REFERENCES namespaces(id) ON DELETE CASCADE, version INTEGER NOT NULL,
  first_id INTEGER NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (namespace_id, version, first_id)
) WITHOUT ROWID;

-- A document's chunks have consecutive ids from first_id on, so filters select ranges.
CREATE TABLE documents (
  id INTEGER PRIMARY KEY, namespace_id INTEGER NOT NULL REFERENCES namespaces(id) ON DELETE CASCADE,
  doc_id TEXT NOT NULL, source TEXT NOT NULL, title TEXT NOT NULL, content_hash TEXT NOT NULL,
  mime TEXT NOT NULL, size_bytes INTEGER NOT NULL,
  first_id INTEGER NOT NULL, n_chunks INTEGER NOT NULL, n_tokens INTEGER NOT NULL,
  created_at REAL NOT NULL, updated_at REAL NOT NULL, metadata TEXT NOT NULL,
  UNIQUE (namespace_id, doc_id)
);

-- AUTOINCREMENT: an id is never used twice, and rows never change, so a row read later is the right one.
CREATE TABLE chunks (
  chunk_id INTEGER PRIMARY KEY AUTOINCREMENT,
  document INTEGER NOT NULL REFERENCES documents(id) ON DELETE CASCADE, ordinal INTEGER NOT NULL,
  start INTEGER NOT NULL, "end" INTEGER NOT NULL, page INTEGER, n_tokens INTEGER NOT NULL, text TEXT NOT NULL,
  edited INTEGER NOT NULL DEFAULT 0 -- 1: a correction's text stands for that of the file
);
CREATE INDEX chunks_by_document ON chunks (document);

-- Up to VECTORS_PER_ROW consecutive chunks' vectors, float32 little-endian [n, dim], written in this version.
CREATE TABLE vectors (
  first_id INTEGER PRIMARY KEY, namespace_id INTEGER NOT NULL, version INTEGER NOT NULL, n INTEGER NOT NULL,
  document INTEGER NOT NULL REFERENCES documents(id) ON DELETE CASCADE, data BLOB NOT NULL
);
CREATE INDEX vectors_by_version ON vectors (namespace_id, version);
CREATE INDEX vectors_by_document ON vectors (document);

CREATE TABLE jobs (
  job_id TEXT PRIMARY KEY, namespace TEXT NOT NULL, state TEXT NOT NULL, spec TEXT NOT NULL, error TEXT,
  cancel_requested INTEGER NOT NULL DEFAULT 0, worker TEXT, lease_until REAL, created_at REAL NOT NULL,
  updated_at REAL NOT NULL
);
CREATE INDEX jobs_by_state ON jobs (state, created_at);

CREATE TABLE job_items (
  item INTEGER PRIMARY KEY, job_id TEXT NOT NULL REFERENCES jobs(job_id) ON DELETE CASCADE,
  source TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'pending', reason TEXT,
  chunks INTEGER NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0,
  size_bytes INTEGER NOT NULL DEFAULT 0, doc_id TEXT, UNIQUE (job_id, source)
);
CREATE INDEX job_items_by_state ON job_items (job_id, state, chunks, tokens, size_bytes);

"""
    + _EVICTIONS
    + _SENTENCES
    + _WORDS
    + _SETTINGS
    + _CORRECTIONS
    + _LABELS
)

MIGRATIONS = {
    1: _EVICTIONS,
    2: "",
    3: _SENTENCES,
    4: _WORDS,
    5: _SETTINGS,
    6: _CORRECTIONS + _EDITED + _LABELS,
}
"""The statements that bring a registry from one format to the next. The lexical indexes, which format 2 had
not, are built after them. All steps are one transaction: a migration that is killed leaves the old format."""
