-- Agent credentials, and the latest contact of each agent. The node is a name and not an id: it may be enrolled before
-- any cycle has seen it.
CREATE TABLE agent (
    node TEXT NOT NULL PRIMARY KEY,
    secret TEXT NOT NULL,
    created BIGINT NOT NULL,
    revoked BIGINT,
    -- Controller's clock; written in batches, up to a minute behind what the controller knows.
    heard BIGINT,
    -- The newest message: its number, and its send time by the node's clock.
    number BIGINT,
    sent BIGINT,
    program TEXT,
    form TEXT,
    policy BIGINT
);

-- Acknowledged events (by requalification or an operator): this record of this boot and all before it. Repeated reports
-- of them do not count.
CREATE TABLE settled (
    node {ref} NOT NULL REFERENCES node (id),
    test {ref} NOT NULL REFERENCES test (id),
    code TEXT NOT NULL,
    entity TEXT NOT NULL,
    key TEXT NOT NULL,
    at BIGINT NOT NULL,
    PRIMARY KEY (node, test, code, entity)
) {compact};
