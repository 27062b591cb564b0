-- Both databases read this file. Parameters are $1, $2, …; SQLite is given them as ?1, ?2, …

-- name: next_number
SELECT coalesce(max(seq_id) + 1, 0) FROM commands WHERE line = $1;

-- name: same_numbers
SELECT seq_id, kind, fingerprint FROM commands WHERE line = $1 AND seq_id BETWEEN $2 AND $3;

-- name: position
SELECT position FROM lines WHERE line = $1;

-- name: last_ordinal
SELECT coalesce(max(ordinal), 0) FROM commands;

-- name: append
INSERT INTO commands (ordinal, line, seq_id, kind, tenant_id, session_id, clone, is_ordered,
    fingerprint, payload_bytes, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11);

-- name: keep_payload
INSERT INTO payloads (command, size_bytes, file, digest, content) VALUES ($1, $2, $3, $4, $5);

-- name: command
SELECT * FROM command_states WHERE line = $1 AND seq_id = $2;

-- name: commands_of_session
SELECT * FROM command_states WHERE session_id = $1 AND ordinal > $2 ORDER BY ordinal LIMIT $3;

-- name: pending
SELECT * FROM command_states WHERE state = 0 ORDER BY ordinal LIMIT $1;

-- name: claim_until
UPDATE commands SET state = 1, claimed_by = $1, claimed_at = $2, claimed_epoch = $4
WHERE state = 0 AND ordinal <= $3;

-- name: claimed_after
SELECT * FROM command_states WHERE state = 1 AND claimed_by = $1 AND claimed_at > $2
ORDER BY ordinal;

-- name: release_claims
UPDATE commands SET state = 0, claimed_by = NULL, claimed_at = NULL
WHERE state = 1 AND claimed_by = $1
RETURNING ordinal;

-- name: has_pending
SELECT 1 FROM commands WHERE state = 0 LIMIT 1;

-- name: cancelled
SELECT line, seq_id FROM commands WHERE is_cancel_untold = 1 AND claimed_by = $1 ORDER BY ordinal;

-- name: cancels_told
UPDATE commands SET is_cancel_untold = 0 WHERE is_cancel_untold = 1 AND claimed_by = $1;

-- name: to_settle
SELECT c.ordinal, c.clone, c.is_ordered, c.state, c.claimed_by, c.claimed_at, p.file
FROM commands c LEFT JOIN payloads p ON p.command = c.ordinal
WHERE c.line = $1 AND c.seq_id = $2 AND c.state < 2;

-- name: add_result
INSERT INTO results (
    command, line, clone, is_failed, settled_at, size_bytes, file, digest, content, started_at, batch,
    epoch
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- name: mark_settled
UPDATE commands SET state = 2, is_cancel_untold = $2 WHERE ordinal = $1;

-- name: drop_payload
DELETE FROM payloads WHERE command = $1;

-- name: payload
SELECT p.size_bytes, p.file, p.digest, p.content
FROM commands c JOIN payloads p ON p.command = c.ordinal
WHERE c.line = $1 AND c.seq_id = $2;

-- name: result
SELECT c.state, r.is_gone, r.is_failed, r.size_bytes, r.file, r.digest, r.content
FROM commands c LEFT JOIN results r ON r.command = c.ordinal
WHERE c.line = $1 AND c.seq_id = $2;

-- name: kept_result
SELECT r.ordinal, r.file FROM commands c JOIN results r ON r.command = c.ordinal
WHERE c.line = $1 AND c.seq_id = $2 AND r.is_gone = 0;

-- name: drop_result
UPDATE results SET is_gone = 1, file = NULL, digest = NULL, content = NULL WHERE ordinal = $1;

-- name: completions
SELECT r.ordinal, c.seq_id, r.is_failed, r.size_bytes
FROM results r JOIN commands c ON c.ordinal = r.command
WHERE r.line = $1 AND r.clone = $2 AND r.ordinal > $3
ORDER BY r.ordinal LIMIT $4;
