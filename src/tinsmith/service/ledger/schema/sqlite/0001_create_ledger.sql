-- Rows that change (commands) and bytes that do not (payloads) are apart: an update then does not
-- write the bytes again. Writers take turns, so a command's ordinal is the next one; having the
-- database choose and return it costs as much as the row.
CREATE TABLE commands (
    ordinal INTEGER PRIMARY KEY,
    line TEXT NOT NULL,
    seq_id INTEGER NOT NULL,
    kind TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    clone INTEGER,
    is_ordered INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    payload_bytes INTEGER NOT NULL,
    created_at REAL NOT NULL,
    state INTEGER NOT NULL DEFAULT 0,
    claimed_by TEXT,
    claimed_at REAL,
    is_cancel_untold INTEGER NOT NULL DEFAULT 0,
    UNIQUE (line, seq_id)
) STRICT;
CREATE INDEX commands_pending ON commands (ordinal) WHERE state = 0;
CREATE INDEX commands_claimed ON commands (claimed_by) WHERE state = 1;
CREATE INDEX commands_cancelled ON commands (claimed_by) WHERE is_cancel_untold = 1;
CREATE INDEX commands_session ON commands (session_id, ordinal);

-- One of content and file; a file is named relative to the payload folder.
CREATE TABLE payloads (
    command INTEGER PRIMARY KEY,
    size_bytes INTEGER NOT NULL,
    file TEXT,
    digest BLOB,
    content BLOB
) STRICT;
CREATE INDEX payloads_file ON payloads (file) WHERE file IS NOT NULL;

-- The ordinal is the cursor of the feeds: it rises with every settlement.
CREATE TABLE results (
    ordinal INTEGER PRIMARY KEY AUTOINCREMENT,
    command INTEGER NOT NULL UNIQUE,
    line TEXT NOT NULL,
    clone INTEGER,
    is_failed INTEGER NOT NULL,
    settled_at REAL NOT NULL,
    is_gone INTEGER NOT NULL DEFAULT 0,
    size_bytes INTEGER NOT NULL,
    file TEXT,
    digest BLOB,
    content BLOB
) STRICT;
CREATE INDEX results_feed ON results (line, clone, ordinal) WHERE clone IS NOT NULL;
CREATE INDEX results_kept ON results (settled_at) WHERE is_gone = 0;
CREATE INDEX results_settled ON results (settled_at);
CREATE INDEX results_file ON results (file) WHERE file IS NOT NULL;

CREATE VIEW command_states AS
SELECT c.ordinal, c.line, c.seq_id, c.kind, c.tenant_id, c.session_id, c.clone, c.is_ordered,
    c.fingerprint, c.payload_bytes, c.created_at, c.state, c.claimed_by, c.claimed_at,
    r.settled_at, r.is_failed, r.size_bytes, r.is_gone
FROM commands c LEFT JOIN results r ON r.command = c.ordinal;

CREATE TABLE lines (
    line TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    snapshot_position INTEGER NOT NULL DEFAULT 0,
    snapshot TEXT
) STRICT;

CREATE TABLE spent_numbers (
    line TEXT NOT NULL,
    seq_id INTEGER NOT NULL,
    PRIMARY KEY (line, seq_id)
) STRICT;

-- Things that are looked up by id and listed, never joined. The body is JSON.
CREATE TABLE entries (
    ordinal INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    parent_id TEXT NOT NULL,
    due_at REAL,
    body TEXT NOT NULL,
    UNIQUE (kind, id)
) STRICT;
CREATE INDEX entries_kind ON entries (kind, ordinal);
CREATE INDEX entries_tenant ON entries (kind, tenant_id, ordinal);
CREATE INDEX entries_parent ON entries (kind, parent_id, ordinal);
CREATE INDEX entries_due ON entries (kind, due_at) WHERE due_at IS NOT NULL;

CREATE TABLE usage (
    tenant_id TEXT NOT NULL,
    hour INTEGER NOT NULL,
    kind TEXT NOT NULL,
    session_id TEXT NOT NULL,
    line TEXT NOT NULL,
    base_model TEXT NOT NULL,
    amount REAL NOT NULL,
    PRIMARY KEY (tenant_id, hour, kind, session_id, line, base_model)
) STRICT;
CREATE INDEX usage_hour ON usage (hour);
