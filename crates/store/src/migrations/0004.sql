-- Documents that came together, compressed together: those of one test are much alike. One is found by `history.bundle`.
-- Documents that are large, and those that a case holds, stand alone in `evidence`.
CREATE TABLE bundle (
    id {number} PRIMARY KEY,
    -- When the newest of them came.
    received BIGINT NOT NULL,
    -- So many are nowhere else.
    documents BIGINT NOT NULL,
    body {blob} NOT NULL
);
CREATE INDEX bundle_received ON bundle (received);
ALTER TABLE history ADD COLUMN bundle BIGINT;

-- Bundles whose results are durable and do not stand in history yet: see inbox.rs.
CREATE TABLE inbox (bundle BIGINT NOT NULL PRIMARY KEY) {compact};

-- What is compressed already is not worth another try.
{only-postgres} ALTER TABLE bundle ALTER COLUMN body SET STORAGE EXTERNAL;
