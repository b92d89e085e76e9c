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
