-- Agents that may speak, each for its own node, and what was last heard of them. A node is named here and not numbered:
-- it may be enrolled before any cycle has seen it.
CREATE TABLE agent (
    node TEXT NOT NULL PRIMARY KEY,
    secret TEXT NOT NULL,
    created BIGINT NOT NULL,
    revoked BIGINT,
    -- By the controller's clock, in batches: up to a minute behind what the controller itself knows.
    heard BIGINT,
    -- Of the newest message: its number, and when it was sent by the node's clock.
    number BIGINT,
    sent BIGINT,
    program TEXT,
    form TEXT,
    policy BIGINT
);

-- Events that have had their answer (a proof, an operator's word): this record of this boot and all before it. Told again
-- they say nothing.
CREATE TABLE settled (
    node {ref} NOT NULL REFERENCES node (id),
    test {ref} NOT NULL REFERENCES test (id),
    code TEXT NOT NULL,
    entity TEXT NOT NULL,
    key TEXT NOT NULL,
    at BIGINT NOT NULL,
    PRIMARY KEY (node, test, code, entity)
) {compact};
