-- Servers append commands at the same time: each transaction takes a block of ordinals, as many as it
-- may append. They begin far above the last one, because a server of the release before may still
-- append, with the next ordinal each.
CREATE SEQUENCE command_ordinals INCREMENT BY 256;
SELECT setval(
    'command_ordinals', (SELECT coalesce(max(ordinal), 0) + 4294967296 FROM commands), false
);
