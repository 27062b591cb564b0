-- name: line
SELECT position, snapshot_position, snapshot FROM lines WHERE line = $1;

-- name: newest_in_line
SELECT created_at FROM commands WHERE line = $1 ORDER BY seq_id DESC LIMIT 1;

-- name: pass_over
INSERT INTO lines (line, position) VALUES ($1, $2)
ON CONFLICT (line) DO UPDATE SET position = excluded.position
WHERE lines.position < excluded.position;

-- name: set_snapshot
INSERT INTO lines (line, position, snapshot_position, snapshot) VALUES ($1, $2, $3, $4)
ON CONFLICT (line) DO UPDATE SET position = excluded.position,
    snapshot_position = excluded.snapshot_position, snapshot = excluded.snapshot;

-- name: covered_payloads
SELECT p.command, p.file FROM commands c JOIN payloads p ON p.command = c.ordinal
WHERE c.line = $1 AND c.seq_id < $2 AND c.state = 2;

-- name: replay
SELECT * FROM command_states
WHERE line = $1 AND is_ordered = 1
    AND seq_id >= coalesce((SELECT snapshot_position FROM lines WHERE line = $1), 0)
ORDER BY seq_id;

-- name: spend
INSERT INTO spent_numbers (line, seq_id) VALUES ($1, $2) ON CONFLICT DO NOTHING;

-- name: spent
SELECT s.seq_id FROM spent_numbers s
WHERE s.line = $1
    AND NOT EXISTS (SELECT 1 FROM commands c WHERE c.line = s.line AND c.seq_id = s.seq_id)
ORDER BY s.seq_id;

-- name: drop_spent
DELETE FROM spent_numbers WHERE line = $1 AND seq_id < $2;
