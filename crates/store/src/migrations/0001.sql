-- The initial schema. schema.rs replaces words in braces, which differ between the databases. Times are milliseconds
-- since 1970 (UTC), durations are milliseconds. Ids of runs, cases and operations start with their creation time
-- (millisecond << 21), so that order by id is order by time.

-- A string or JSON value by key: the cluster's id, the breaker, one-time notices.
CREATE TABLE meta (key TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL) {compact};
CREATE TABLE counter (name TEXT NOT NULL PRIMARY KEY, value BIGINT NOT NULL) {compact};

-- The leader. One row. Each take-over has a higher fence.
CREATE TABLE lease (
    id SMALLINT NOT NULL PRIMARY KEY CHECK (id = 1),
    holder TEXT NOT NULL,
    fence BIGINT NOT NULL,
    expires BIGINT NOT NULL
);
INSERT INTO lease (id, holder, fence, expires) VALUES (1, '', 0, 0);

-- Names are stored once and referenced by small ids.
CREATE TABLE node (
    id {serial},
    name TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    state_since BIGINT NOT NULL,
    -- Results up to this time belong to an earlier machine with this name.
    results_valid_from BIGINT,
    hardware_id TEXT,
    boot_id TEXT,
    hardware_seen_at BIGINT,
    backoff_until BIGINT,
    backoff_count BIGINT,
    hold TEXT,
    case_id BIGINT,
    -- The agent's last stored report: its number, and its send time by the node's clock.
    last_report_number BIGINT,
    last_report_sent_at BIGINT,
    -- When the agent last ran each of its checks: `TIME:TEST,TEST;TIME:TEST`, in milliseconds and ids of tests.
    agent_checked TEXT
);
CREATE TABLE test (id {serial}, name TEXT NOT NULL UNIQUE);
CREATE TABLE outcome (
    id {serial},
    name TEXT NOT NULL UNIQUE,
    verdict TEXT NOT NULL,
    severity TEXT,
    reason TEXT NOT NULL,
    untrusted SMALLINT NOT NULL,
    imported SMALLINT NOT NULL,
    by_agent SMALLINT NOT NULL
);

CREATE TABLE hardware (
    node {ref} NOT NULL REFERENCES node (id),
    hardware_id TEXT NOT NULL,
    first_seen BIGINT NOT NULL,
    last_seen BIGINT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (node, hardware_id)
) {compact};

-- A run without `end_kind` and without rows in `pending_results` was completed, and ended with its last result.
CREATE TABLE run (
    id {number} PRIMARY KEY,
    state TEXT NOT NULL,
    nodes TEXT NOT NULL,
    tests TEXT NOT NULL,
    node_count BIGINT NOT NULL,
    purpose TEXT NOT NULL,
    reason_code TEXT NOT NULL,
    reason_text TEXT NOT NULL,
    case_id BIGINT,
    planned BIGINT NOT NULL,
    time_limit BIGINT NOT NULL,
    job TEXT,
    submitted BIGINT,
    started BIGINT,
    ended BIGINT,
    end_kind TEXT,
    end_reason TEXT,
    cancel_reason TEXT,
    cancel_since BIGINT,
    logs_pruned SMALLINT NOT NULL DEFAULT 0
);
CREATE INDEX run_by_case ON run (case_id) WHERE case_id IS NOT NULL;

CREATE TABLE run_node (
    run BIGINT NOT NULL REFERENCES run (id),
    node {ref} NOT NULL REFERENCES node (id),
    PRIMARY KEY (run, node)
) {compact};

-- Pending results of active runs by node, from plan to end: a run is active while it has rows here. No other row of a
-- run changes when its last result arrives, which makes a result cheap.
CREATE TABLE pending_results (
    run BIGINT NOT NULL REFERENCES run (id),
    -- Rejects a second run on a node.
    node {ref} NOT NULL UNIQUE REFERENCES node (id),
    -- The run's one-time key, erased with the row.
    run_key TEXT NOT NULL,
    received_at BIGINT,
    complete SMALLINT NOT NULL,
    PRIMARY KEY (run, node)
) {compact};

-- Every result of runs, and every changed result of agents, under a run id that is made of its time. `offset_ms` is
-- relative to the run's creation, which keeps rows small.
CREATE TABLE history (
    node {ref} NOT NULL,
    run BIGINT NOT NULL,
    test {ref} NOT NULL,
    outcome {ref} NOT NULL,
    offset_ms BIGINT NOT NULL,
    duration_ms BIGINT NOT NULL,
    evidence_pack BIGINT,
    PRIMARY KEY (node, run, test)
) {compact};

-- The fold of the history of runs by node and test. `verify` recomputes it.
CREATE TABLE latest_result (
    node {ref} NOT NULL,
    test {ref} NOT NULL,
    attempted_at BIGINT NOT NULL,
    outcome {ref} NOT NULL,
    run BIGINT NOT NULL,
    settled_at BIGINT,
    conclusive_outcome {ref},
    conclusive_at BIGINT,
    inconclusive_count BIGINT NOT NULL,
    PRIMARY KEY (node, test)
) {compact};
-- Every result updates a row; free space in its page avoids index updates.
{only-postgres} ALTER TABLE latest_result SET (fillfactor = 70);

-- The latest results of a node's agent. A row changes when the result does, which is rare: an unchanged result is
-- renewed for all checks of the node together, in `node.agent_checked`.
CREATE TABLE agent_result (
    node {ref} NOT NULL,
    test {ref} NOT NULL,
    attempted_at BIGINT NOT NULL,
    outcome {ref} NOT NULL,
    settled_at BIGINT,
    conclusive_outcome {ref},
    conclusive_at BIGINT,
    inconclusive_count BIGINT NOT NULL,
    PRIMARY KEY (node, test)
) {compact};

CREATE TABLE hourly_count (
    hour BIGINT NOT NULL,
    test {ref} NOT NULL,
    passed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    inconclusive BIGINT NOT NULL,
    not_applicable BIGINT NOT NULL,
    PRIMARY KEY (hour, test)
) {compact};

-- Node-time used by runs, in slots of ten minutes.
CREATE TABLE node_hours (slot BIGINT NOT NULL PRIMARY KEY, node_millis BIGINT NOT NULL) {compact};

CREATE TABLE finding (
    node {ref} NOT NULL REFERENCES node (id),
    test {ref} NOT NULL REFERENCES test (id),
    entity TEXT NOT NULL,
    rule TEXT NOT NULL,
    run BIGINT,
    body TEXT NOT NULL,
    PRIMARY KEY (node, test, entity, rule)
) {compact};

-- Acknowledged events (by requalification or an operator): this record of this boot and all before it. Repeated reports
-- of them do not count.
CREATE TABLE acknowledged_event (
    node {ref} NOT NULL REFERENCES node (id),
    test {ref} NOT NULL REFERENCES test (id),
    reason_code TEXT NOT NULL,
    entity TEXT NOT NULL,
    event_key TEXT NOT NULL,
    at BIGINT NOT NULL,
    PRIMARY KEY (node, test, reason_code, entity)
) {compact};

-- Counts and sizes (GPUs, disks, ports) by node and metric: the newest value with the time since when it applies, and
-- the one with which new values are compared. Numbers are text, which both databases return unchanged.
CREATE TABLE measured_count (
    node {ref} NOT NULL REFERENCES node (id),
    metric TEXT NOT NULL,
    value TEXT NOT NULL,
    at BIGINT NOT NULL,
    accepted_value TEXT NOT NULL,
    accepted_at BIGINT NOT NULL,
    PRIMARY KEY (node, metric)
) {compact};

CREATE TABLE case_record (
    id {number} PRIMARY KEY,
    node {ref} NOT NULL REFERENCES node (id),
    hardware_id TEXT NOT NULL,
    opened BIGINT NOT NULL,
    closed BIGINT,
    body TEXT NOT NULL
);
CREATE INDEX case_record_open ON case_record (id) WHERE closed IS NULL;
CREATE INDEX case_record_closed ON case_record (closed) WHERE closed IS NOT NULL;
-- Cases that an operator has acknowledged or snoozed.
CREATE TABLE mute (case_id BIGINT NOT NULL PRIMARY KEY, body TEXT NOT NULL) {compact};

-- Documents stored on their own: large ones, and those that a case depends on.
CREATE TABLE evidence (
    run BIGINT NOT NULL,
    node {ref} NOT NULL,
    received BIGINT NOT NULL,
    policy_version BIGINT NOT NULL,
    profile_version BIGINT,
    truncated SMALLINT NOT NULL,
    case_id BIGINT,
    body {blob} NOT NULL,
    PRIMARY KEY (run, node)
);
-- Documents stored and compressed together: those of one test are alike. `history.evidence_pack` refers to one.
CREATE TABLE evidence_pack (
    id {number} PRIMARY KEY,
    -- When the newest document was received.
    received BIGINT NOT NULL,
    -- Number of documents that are stored only here.
    documents BIGINT NOT NULL,
    body {blob} NOT NULL
);
CREATE INDEX evidence_pack_received ON evidence_pack (received);
-- Already compressed; compressing again gains nothing.
{only-postgres} ALTER TABLE evidence_pack ALTER COLUMN body SET STORAGE EXTERNAL;
-- Evidence packs whose results are durable but not in history yet.
CREATE TABLE ingest_queue (evidence_pack BIGINT NOT NULL PRIMARY KEY) {compact};

CREATE TABLE cycle (
    id {serial},
    at BIGINT NOT NULL,
    actions BIGINT NOT NULL,
    submitted BIGINT NOT NULL,
    policy_version BIGINT NOT NULL,
    duration_ms BIGINT,
    error TEXT
);
-- Why the planner skipped a node.
CREATE TABLE skip_reason (
    node {ref} NOT NULL PRIMARY KEY REFERENCES node (id),
    since BIGINT NOT NULL,
    body TEXT NOT NULL
);
-- The audit lines with a cycle's id are its plan.
CREATE TABLE audit_log (
    id {serial},
    at BIGINT NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    node {ref},
    case_id BIGINT,
    run BIGINT,
    reason_code TEXT NOT NULL,
    reason_text TEXT NOT NULL,
    cycle BIGINT,
    -- Origin of an API request, and the plan shown before it was carried out.
    origin TEXT,
    plan TEXT
);
CREATE INDEX audit_log_by_node ON audit_log (node, id) WHERE node IS NOT NULL;

-- Nodes that the controller took out of service on its own initiative.
CREATE TABLE node_taken_out (
    at BIGINT NOT NULL,
    node {ref} NOT NULL REFERENCES node (id),
    PRIMARY KEY (at, node)
) {compact};
CREATE TABLE operator_command (
    id {serial},
    actor TEXT NOT NULL,
    reason TEXT NOT NULL,
    at BIGINT NOT NULL,
    body TEXT NOT NULL
);
-- `pool` is empty for a pause of everything.
CREATE TABLE pause (pool TEXT NOT NULL PRIMARY KEY, body TEXT NOT NULL) {compact};

-- Agent credentials, and the latest contact of each agent. The node is a name and not an id: it may be enrolled before
-- any cycle has seen it.
CREATE TABLE agent (
    node TEXT NOT NULL PRIMARY KEY,
    agent_key TEXT NOT NULL,
    created BIGINT NOT NULL,
    revoked BIGINT,
    -- Controller's clock; written in batches, up to a minute behind what the controller knows.
    last_contact_at BIGINT,
    -- The newest message: its number, and its send time by the node's clock.
    last_message_number BIGINT,
    last_message_sent_at BIGINT,
    program_version TEXT,
    report_schema TEXT,
    policy_version BIGINT
);
-- API tokens. Only the digest is stored; it cannot be used to sign in.
CREATE TABLE token (
    name TEXT NOT NULL PRIMARY KEY,
    role TEXT NOT NULL,
    digest TEXT NOT NULL,
    created_by TEXT NOT NULL,
    created BIGINT NOT NULL,
    expires BIGINT,
    revoked BIGINT
) {compact};

-- Failed user jobs by node, as the cluster reports them. `job` is the cluster's id of the job: a repeated report is one
-- row.
CREATE TABLE job_failure (
    job TEXT NOT NULL,
    node {ref} NOT NULL REFERENCES node (id),
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    at BIGINT NOT NULL,
    failure_kind TEXT NOT NULL,
    PRIMARY KEY (job, node)
) {compact};
CREATE INDEX job_failure_at ON job_failure (at);

-- Outgoing notifications, one receiver each. During a delivery attempt, `next_attempt_at` is the end of the claim on
-- it.
CREATE TABLE alert_message (
    id {serial},
    receiver TEXT NOT NULL,
    composed BIGINT NOT NULL,
    expires BIGINT NOT NULL,
    state TEXT NOT NULL,
    attempts BIGINT NOT NULL,
    next_attempt_at BIGINT NOT NULL,
    last_error TEXT,
    ended BIGINT
);
CREATE INDEX alert_message_waiting ON alert_message (receiver) WHERE state = 'waiting';
CREATE INDEX alert_message_ended ON alert_message (ended) WHERE ended IS NOT NULL;

-- Notes by receiver, written with the decision they report. A note without a message waits for the next one.
CREATE TABLE alert_note (
    id {serial},
    receiver TEXT NOT NULL,
    message {ref} REFERENCES alert_message (id),
    body TEXT NOT NULL
);
CREATE INDEX alert_note_pending ON alert_note (receiver, id) WHERE message IS NULL;
CREATE INDEX alert_note_by_message ON alert_note (message) WHERE message IS NOT NULL;

-- Active conditions of the service that were notified.
CREATE TABLE alert_condition (name TEXT NOT NULL PRIMARY KEY, since BIGINT NOT NULL) {compact};

-- The last cluster state the leader observed, compressed. One row.
CREATE TABLE cluster_state (id {number} NOT NULL PRIMARY KEY, at BIGINT NOT NULL, body {blob} NOT NULL);
{only-postgres} ALTER TABLE cluster_state ALTER COLUMN body SET STORAGE EXTERNAL;
