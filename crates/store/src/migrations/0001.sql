-- The first schema. schema.rs replaces words in braces, which differ between the databases. Times are milliseconds
-- since 1970 (UTC), durations are milliseconds. Ids of runs, cases and operations start with their creation time
-- (millisecond << 21), so that order by id is order by time.

-- A string or JSON value by key: the cluster's id, the breaker, one-time notices.
CREATE TABLE meta (key TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL) {compact};
CREATE TABLE counter (name TEXT NOT NULL PRIMARY KEY, n BIGINT NOT NULL) {compact};

-- The leader. One row. Each take-over has a higher fence.
CREATE TABLE lease (
    one SMALLINT NOT NULL PRIMARY KEY CHECK (one = 1),
    holder TEXT NOT NULL,
    fence BIGINT NOT NULL,
    expires BIGINT NOT NULL
);
INSERT INTO lease (one, holder, fence, expires) VALUES (1, '', 0, 0);

-- Names are stored once and referenced by small ids.
CREATE TABLE node (
    id {serial},
    name TEXT NOT NULL UNIQUE,
    life TEXT NOT NULL,
    since BIGINT NOT NULL,
    -- Results up to this time belong to an earlier machine with this name.
    counts_from BIGINT,
    hardware TEXT,
    boot TEXT,
    hardware_seen BIGINT,
    backoff_until BIGINT,
    backoff_times BIGINT,
    hold TEXT,
    case_id BIGINT,
    -- The agent's last stored report: its number, and its send time by the node's clock.
    report BIGINT,
    report_sent BIGINT
);
CREATE TABLE test (id {serial}, name TEXT NOT NULL UNIQUE);
CREATE TABLE outcome (
    id {serial},
    name TEXT NOT NULL UNIQUE,
    verdict TEXT NOT NULL,
    severity TEXT,
    reason TEXT NOT NULL,
    untrusted SMALLINT NOT NULL,
    imported SMALLINT NOT NULL
);

CREATE TABLE hardware (
    node {ref} NOT NULL REFERENCES node (id),
    hardware TEXT NOT NULL,
    first_seen BIGINT NOT NULL,
    last_seen BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (node, hardware)
) {compact};

CREATE TABLE run (
    id {number} PRIMARY KEY,
    state TEXT NOT NULL,
    nodes TEXT NOT NULL,
    tests TEXT NOT NULL,
    node_count BIGINT NOT NULL,
    purpose TEXT NOT NULL,
    code TEXT NOT NULL,
    words TEXT NOT NULL,
    case_id BIGINT,
    planned BIGINT NOT NULL,
    time_limit BIGINT NOT NULL,
    -- One-time key; erased when the run ends.
    secret TEXT,
    job TEXT,
    submitted BIGINT,
    started BIGINT,
    ended BIGINT,
    ending TEXT,
    why TEXT,
    cancel_why TEXT,
    cancel_since BIGINT,
    logs_pruned SMALLINT NOT NULL DEFAULT 0
);
-- Covers the sum of a day's node-hours.
CREATE INDEX run_ended ON run (ended, started, node_count) WHERE state = 'ended';
CREATE INDEX run_case ON run (case_id) WHERE case_id IS NOT NULL;

CREATE TABLE run_node (
    run BIGINT NOT NULL REFERENCES run (id),
    node {ref} NOT NULL REFERENCES node (id),
    answered BIGINT,
    whole SMALLINT NOT NULL,
    active SMALLINT NOT NULL,
    PRIMARY KEY (run, node)
) {compact};
-- Rejects a second run on a node.
CREATE UNIQUE INDEX one_run_per_node ON run_node (node) WHERE active = 1;

-- Every result. `at` is relative to the run's creation, which keeps rows small.
CREATE TABLE history (
    node {ref} NOT NULL,
    run BIGINT NOT NULL,
    test {ref} NOT NULL,
    outcome {ref} NOT NULL,
    at BIGINT NOT NULL,
    took BIGINT NOT NULL,
    PRIMARY KEY (node, run, test)
) {compact};

-- The fold of history by node and test. `verify` recomputes it.
CREATE TABLE latest (
    node {ref} NOT NULL,
    test {ref} NOT NULL,
    attempt BIGINT NOT NULL,
    outcome {ref} NOT NULL,
    run BIGINT NOT NULL,
    settled BIGINT,
    sure {ref},
    sure_at BIGINT,
    misses BIGINT NOT NULL,
    PRIMARY KEY (node, test)
) {compact};

CREATE TABLE hourly (
    hour BIGINT NOT NULL,
    test {ref} NOT NULL,
    passed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    inconclusive BIGINT NOT NULL,
    not_applicable BIGINT NOT NULL,
    PRIMARY KEY (hour, test)
) {compact};

CREATE TABLE finding (
    node {ref} NOT NULL REFERENCES node (id),
    test {ref} NOT NULL REFERENCES test (id),
    entity TEXT NOT NULL,
    rule TEXT NOT NULL,
    run BIGINT,
    body TEXT NOT NULL,
    PRIMARY KEY (node, test, entity, rule)
) {compact};

CREATE TABLE case_file (
    id {number} PRIMARY KEY,
    node {ref} NOT NULL REFERENCES node (id),
    hardware TEXT NOT NULL,
    opened BIGINT NOT NULL,
    closed BIGINT,
    body TEXT NOT NULL
);
CREATE INDEX case_open ON case_file (id) WHERE closed IS NULL;
CREATE INDEX case_closed ON case_file (closed) WHERE closed IS NOT NULL;

CREATE TABLE evidence (
    run BIGINT NOT NULL,
    node {ref} NOT NULL,
    received BIGINT NOT NULL,
    policy BIGINT NOT NULL,
    profile BIGINT,
    truncated SMALLINT NOT NULL,
    case_id BIGINT,
    body {blob} NOT NULL,
    PRIMARY KEY (run, node)
);

CREATE TABLE cycle (
    id {serial},
    at BIGINT NOT NULL,
    actions BIGINT NOT NULL,
    submitted BIGINT NOT NULL,
    policy BIGINT NOT NULL,
    took BIGINT,
    trouble TEXT
);
CREATE TABLE reason (
    node {ref} NOT NULL PRIMARY KEY REFERENCES node (id),
    since BIGINT NOT NULL,
    body TEXT NOT NULL
);
-- The audit lines with a cycle's id are its plan.
CREATE TABLE audit (
    id {serial},
    at BIGINT NOT NULL,
    actor TEXT NOT NULL,
    what TEXT NOT NULL,
    node {ref},
    case_id BIGINT,
    run BIGINT,
    code TEXT NOT NULL,
    words TEXT NOT NULL,
    cycle BIGINT
);
CREATE INDEX audit_node ON audit (node, id) WHERE node IS NOT NULL;

CREATE TABLE taken_out (
    at BIGINT NOT NULL,
    node {ref} NOT NULL REFERENCES node (id),
    PRIMARY KEY (at, node)
) {compact};
CREATE TABLE request (
    id {serial},
    actor TEXT NOT NULL,
    why TEXT NOT NULL,
    at BIGINT NOT NULL,
    body TEXT NOT NULL
);
-- `pool` is empty for a pause of everything.
CREATE TABLE pause (pool TEXT NOT NULL PRIMARY KEY, body TEXT NOT NULL) {compact};
