-- What runs under way still wait for, node by node, from the plan to the end of the run: a run is active while it has rows
-- here. Nothing else of a run changes when its last result comes, which is what makes a result cheap.
CREATE TABLE awaited (
    run BIGINT NOT NULL REFERENCES run (id),
    -- The database itself refuses a second run on a node.
    node {ref} NOT NULL UNIQUE REFERENCES node (id),
    -- The run's one-time key. It is erased with the row.
    secret TEXT NOT NULL,
    answered BIGINT,
    whole SMALLINT NOT NULL,
    PRIMARY KEY (run, node)
) {compact};
INSERT INTO awaited (run, node, secret, answered, whole)
    SELECT n.run, n.node, COALESCE(r.secret, ''), n.answered, n.whole
    FROM run_node n JOIN run r ON r.id = n.run WHERE n.active = 1;
-- From here on a run without `ending` that nobody awaits was completed, and ended with the last of its results.
DROP INDEX one_run_per_node;
ALTER TABLE run_node DROP COLUMN answered;
ALTER TABLE run_node DROP COLUMN whole;
ALTER TABLE run_node DROP COLUMN active;
ALTER TABLE run DROP COLUMN secret;

-- Node-time that runs have spent, by ten minutes. Of runs before this, all of it stands where they ended.
CREATE TABLE spent (slot BIGINT NOT NULL PRIMARY KEY, millis BIGINT NOT NULL) {compact};
INSERT INTO spent (slot, millis)
    SELECT ended / 600000, SUM((ended - started) * node_count) FROM run
    WHERE state = 'ended' AND started IS NOT NULL AND ended > started GROUP BY ended / 600000;
DROP INDEX run_ended;

-- Each result changes a row of this; where its page has room no index is touched.
{only-postgres} ALTER TABLE latest SET (fillfactor = 70);
