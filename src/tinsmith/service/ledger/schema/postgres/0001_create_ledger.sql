-- Rows that change (commands) and bytes that do not (payloads) are apart: an update then does not
-- write the bytes again. Writers take turns, so a command's ordinal is the next one; having the
-- database choose and return it costs as much as the row.
CREATE TABLE commands (
    ordinal BIGINT PRIMARY KEY,
    line TEXT NOT NULL,
    seq_id BIGINT NOT NULL,
    kind TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    clone BIGINT,
    is_ordered BIGINT NOT NULL,
    fingerprint BYTEA NOT NULL,
    payload_bytes BIGINT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    state BIGINT NOT NULL DEFAULT 0,
    claimed_by TEXT,
    claimed_at DOUBLE PRECISION,
    is_cancel_untold BIGINT NOT NULL DEFAULT 0,
    UNIQUE (line, seq_id)
);
CREATE INDEX commands_pending ON commands (ordinal) WHERE state = 0;
CREATE INDEX commands_claimed ON commands (claimed_by) WHERE state = 1;
CREATE INDEX commands_cancelled ON commands (claimed_by) WHERE is_cancel_untold = 1;
CREATE INDEX commands_session ON commands (session_id, ordinal);

-- Content is always here: several servers share the ledger, and no folder. `file` stays empty.
CREATE TABLE payloads (
    command BIGINT PRIMARY KEY,
    size_bytes BIGINT NOT NULL,
    file TEXT,
    digest BYTEA,
    content BYTEA
);
CREATE INDEX payloads_file ON payloads (file) WHERE file IS NOT NULL;

-- The ordinal is the cursor of the feeds: it rises with every settlement.
CREATE TABLE results (
    ordinal BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    command BIGINT NOT NULL UNIQUE,
    line TEXT NOT NULL,
    clone BIGINT,
    is_failed BIGINT NOT NULL,
    settled_at DOUBLE PRECISION NOT NULL,
    is_gone BIGINT NOT NULL DEFAULT 0,
    size_bytes BIGINT NOT NULL,
    file TEXT,
    digest BYTEA,
    content BYTEA
);
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
    position BIGINT NOT NULL,
    snapshot_position BIGINT NOT NULL DEFAULT 0,
    snapshot TEXT
);

CREATE TABLE spent_numbers (
    line TEXT NOT NULL,
    seq_id BIGINT NOT NULL,
    PRIMARY KEY (line, seq_id)
);

-- Things that are looked up by id and listed, never joined. The body is JSON.
CREATE TABLE entries (
    ordinal BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    parent_id TEXT NOT NULL,
    due_at DOUBLE PRECISION,
    body TEXT NOT NULL,
    UNIQUE (kind, id)
);
CREATE INDEX entries_kind ON entries (kind, ordinal);
CREATE INDEX entries_tenant ON entries (kind, tenant_id, ordinal);
CREATE INDEX entries_parent ON entries (kind, parent_id, ordinal);
CREATE INDEX entries_due ON entries (kind, due_at) WHERE due_at IS NOT NULL;

CREATE TABLE usage (
    tenant_id TEXT NOT NULL,
    hour BIGINT NOT NULL,
    kind TEXT NOT NULL,
    session_id TEXT NOT NULL,
    line TEXT NOT NULL,
    base_model TEXT NOT NULL,
    amount DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (tenant_id, hour, kind, session_id, line, base_model)
);
CREATE INDEX usage_hour ON usage (hour);
