-- Pending results of active runs by node, from plan to end: a run is active while it has rows here. No other row of a
-- run changes when its last result arrives, which makes a result cheap.
CREATE TABLE awaited (
    run BIGINT NOT NULL REFERENCES run (id),
    -- Rejects a second run on a node.
    node {ref} NOT NULL UNIQUE REFERENCES node (id),
    -- The run's one-time key, erased with the row.
    secret TEXT NOT NULL,
    answered BIGINT,
    whole SMALLINT NOT NULL,
    PRIMARY KEY (run, node)
) {compact};
INSERT INTO awaited (run, node, secret, answered, whole)
    SELECT n.run, n.node, COALESCE(r.secret, ''), n.answered, n.whole
    FROM run_node n JOIN run r ON r.id = n.run WHERE n.active = 1;
-- From here on, a run without `ending` and without rows in `awaited` was completed, and ended with its last result.
DROP INDEX one_run_per_node;
ALTER TABLE run_node DROP COLUMN answered;
ALTER TABLE run_node DROP COLUMN whole;
ALTER TABLE run_node DROP COLUMN active;
ALTER TABLE run DROP COLUMN secret;

-- Node-time used by runs, in slots of ten minutes. For earlier runs, all of it is in the slot in which they ended.
CREATE TABLE spent (slot BIGINT NOT NULL PRIMARY KEY, millis BIGINT NOT NULL) {compact};
INSERT INTO spent (slot, millis)
    SELECT ended / 600000, SUM((ended - started) * node_count) FROM run
    WHERE state = 'ended' AND started IS NOT NULL AND ended > started GROUP BY ended / 600000;
DROP INDEX run_ended;

-- Every result updates a row; free space in its page avoids index updates.
{only-postgres} ALTER TABLE latest SET (fillfactor = 70);
