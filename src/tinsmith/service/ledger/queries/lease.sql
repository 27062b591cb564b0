-- name: lease_epoch
SELECT epoch FROM lease;

-- name: next_epoch
UPDATE lease SET epoch = epoch + 1, owner = $1 RETURNING epoch;
