-- What the sweep removes, and how much there is.

-- name: expired_results
SELECT ordinal, file FROM results WHERE is_gone = 0 AND settled_at < $1
ORDER BY settled_at LIMIT $2;

-- name: forgettable_commands
SELECT c.ordinal, p.file, r.file
FROM results r
JOIN commands c ON c.ordinal = r.command
LEFT JOIN payloads p ON p.command = c.ordinal
LEFT JOIN lines l ON l.line = c.line
WHERE r.settled_at < $1
    AND (c.is_ordered = 0 OR c.seq_id < coalesce(l.snapshot_position, 0))
ORDER BY r.settled_at LIMIT $2;

-- name: commands_of_line
SELECT c.ordinal, p.file, r.file
FROM commands c
LEFT JOIN payloads p ON p.command = c.ordinal
LEFT JOIN results r ON r.command = c.ordinal
WHERE c.line = $1;

-- name: drop_command
DELETE FROM commands WHERE ordinal = $1;

-- name: drop_result_of
DELETE FROM results WHERE command = $1;

-- name: drop_line
DELETE FROM lines WHERE line = $1;

-- name: drop_usage
DELETE FROM usage WHERE hour < $1;

-- name: file_is_named
SELECT 1 FROM payloads WHERE file = $1
UNION ALL SELECT 1 FROM results WHERE file = $1 LIMIT 1;

-- name: latest_time
SELECT max(t) FROM (
    SELECT max(settled_at) AS t FROM results
    UNION ALL SELECT created_at FROM commands
        WHERE ordinal = (SELECT max(ordinal) FROM commands)
) AS times;

-- name: unsettled_totals
SELECT (SELECT count(*) FROM commands WHERE state = 0),
    (SELECT count(*) FROM commands WHERE state = 1),
    (SELECT created_at FROM commands WHERE state = 0 ORDER BY ordinal LIMIT 1);

-- name: unsettled_by_tenant
-- In two parts, so that each is found in the index of its state.
SELECT tenant_id, count(*), sum(payload_bytes) FROM commands WHERE state = 0 GROUP BY tenant_id
UNION ALL
SELECT tenant_id, count(*), sum(payload_bytes) FROM commands WHERE state = 1 GROUP BY tenant_id;

-- name: kept_totals
-- Read every few seconds: each part is found in an index, without the rows and what they hold.
SELECT (SELECT coalesce(sum(size_bytes), 0) FROM payloads)
        + (SELECT coalesce(sum(size_bytes), 0) FROM results WHERE is_gone = 0),
    (SELECT count(*) FROM payloads WHERE file IS NOT NULL)
        + (SELECT count(*) FROM results WHERE file IS NOT NULL);
