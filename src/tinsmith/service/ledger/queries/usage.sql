-- name: add_use
INSERT INTO usage (tenant_id, hour, kind, session_id, line, base_model, amount)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (tenant_id, hour, kind, session_id, line, base_model)
DO UPDATE SET amount = usage.amount + excluded.amount;

-- name: usage
SELECT hour, kind, session_id, line, base_model, amount FROM usage
WHERE tenant_id = $1 AND hour >= $2 AND hour < $3
ORDER BY hour, kind, session_id, line, base_model;
