-- Whose scheduler works: one row. The epoch rises by one with each that begins. Results and claims say
-- under which epoch they were made; those from before have none.
CREATE TABLE lease (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    epoch INTEGER NOT NULL,
    owner TEXT NOT NULL
) STRICT;
INSERT INTO lease VALUES (1, 0, '');

ALTER TABLE commands ADD COLUMN claimed_epoch INTEGER;
ALTER TABLE results ADD COLUMN epoch INTEGER;
