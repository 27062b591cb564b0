-- name: add_entry
INSERT INTO entries (kind, id, tenant_id, parent_id, due_at, body) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (kind, id) DO NOTHING
RETURNING ordinal;

-- name: entry
SELECT body FROM entries WHERE kind = $1 AND id = $2;

-- name: change_entry
UPDATE entries SET tenant_id = $3, parent_id = $4, due_at = $5, body = $6
WHERE kind = $1 AND id = $2;

-- name: remove_entry
DELETE FROM entries WHERE kind = $1 AND id = $2 RETURNING body;

-- name: all_entries
SELECT body FROM entries WHERE kind = $1 ORDER BY ordinal DESC LIMIT $2 OFFSET $3;

-- name: entries_of_tenant
SELECT body FROM entries WHERE kind = $1 AND tenant_id = $2
ORDER BY ordinal DESC LIMIT $3 OFFSET $4;

-- name: entries_of_parent
SELECT body FROM entries WHERE kind = $1 AND parent_id = $2
ORDER BY ordinal DESC LIMIT $3 OFFSET $4;

-- name: entries_due
SELECT body FROM entries WHERE kind = $1 AND due_at < $2 AND due_at >= $3
ORDER BY due_at, ordinal LIMIT $4;

-- name: entries_due_of_tenant
SELECT body FROM entries WHERE kind = $1 AND due_at < $2 AND due_at >= $3 AND tenant_id = $5
ORDER BY due_at, ordinal LIMIT $4;

-- name: count_entries
SELECT count(*) FROM entries WHERE kind = $1;

-- name: count_entries_of_tenant
SELECT count(*) FROM entries WHERE kind = $1 AND tenant_id = $2;
