-- Whose scheduler works: one row. The epoch rises by one with each that begins. Results and claims say
-- under which epoch they were made; those from before have none.
CREATE TABLE lease (
    id BIGINT PRIMARY KEY CHECK (id = 1),
    epoch BIGINT NOT NULL,
    owner TEXT NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL
);
INSERT INTO lease VALUES (1, 0, '', '-infinity');

ALTER TABLE commands ADD COLUMN claimed_epoch BIGINT;
ALTER TABLE results ADD COLUMN epoch BIGINT;
