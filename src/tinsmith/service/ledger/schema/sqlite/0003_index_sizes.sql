-- How much is kept is asked every few seconds, and is summed without a look at the rows.
CREATE INDEX payloads_size ON payloads (size_bytes);
DROP INDEX results_kept;
CREATE INDEX results_kept ON results (settled_at, size_bytes) WHERE is_gone = 0;
