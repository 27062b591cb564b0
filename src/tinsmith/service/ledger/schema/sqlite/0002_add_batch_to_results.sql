-- When a command was begun and with what it shared a call of the engine, for whoever looks back.
ALTER TABLE results ADD COLUMN started_at REAL;
ALTER TABLE results ADD COLUMN batch TEXT;

DROP VIEW command_states;
CREATE VIEW command_states AS
SELECT c.ordinal, c.line, c.seq_id, c.kind, c.tenant_id, c.session_id, c.clone, c.is_ordered,
    c.fingerprint, c.payload_bytes, c.created_at, c.state, c.claimed_by, c.claimed_at,
    r.settled_at, r.is_failed, r.size_bytes, r.is_gone, r.started_at, r.batch
FROM commands c LEFT JOIN results r ON r.command = c.ordinal;
