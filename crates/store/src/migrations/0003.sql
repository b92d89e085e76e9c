-- Replaces the queue of classified results, which no released controller ever filled, by the queue of verified messages:
-- reports of agents, and result documents of runs, that are durable and not in history yet.
DROP TABLE ingest_queue;
CREATE TABLE ingest_queue (
    -- The time of arrival in milliseconds, and 20 bits that differ.
    id {number} PRIMARY KEY,
    node {ref} NOT NULL REFERENCES node (id),
    -- NULL: a report of the node's agent.
    run BIGINT,
    received BIGINT NOT NULL,
    -- Length of the message, and of `body`.
    length BIGINT NOT NULL,
    stored_length BIGINT NOT NULL,
    -- The signed message, compressed.
    body {blob} NOT NULL
);
-- Sizes are summed over this index, which has no bodies.
CREATE INDEX ingest_queue_by_node ON ingest_queue (node, stored_length);
CREATE INDEX ingest_queue_by_run ON ingest_queue (run);
-- Already compressed; compressing again gains nothing.
{only-postgres} ALTER TABLE ingest_queue ALTER COLUMN body SET STORAGE EXTERNAL;
-- Whether a result of this node is, or was, in the ingest queue.
ALTER TABLE pending_results ADD COLUMN queued SMALLINT NOT NULL DEFAULT 0;
