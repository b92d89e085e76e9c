-- Documents stored and compressed together: those of one test are alike. `history.bundle` refers to one. Large
-- documents, and those that a case depends on, are in `evidence`.
CREATE TABLE bundle (
    id {number} PRIMARY KEY,
    -- When the newest document was received.
    received BIGINT NOT NULL,
    -- Number of documents that are stored only here.
    documents BIGINT NOT NULL,
    body {blob} NOT NULL
);
CREATE INDEX bundle_received ON bundle (received);
ALTER TABLE history ADD COLUMN bundle BIGINT;

-- Bundles whose results are durable but not in history yet: see inbox.rs.
CREATE TABLE inbox (bundle BIGINT NOT NULL PRIMARY KEY) {compact};

-- Already compressed; compressing again gains nothing.
{only-postgres} ALTER TABLE bundle ALTER COLUMN body SET STORAGE EXTERNAL;
