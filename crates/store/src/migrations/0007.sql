-- Messages to people, one receiver each. `next` is when it is tried next; while somebody tries, until when it is left to him.
CREATE TABLE alert_message (
    id {serial},
    receiver TEXT NOT NULL,
    composed BIGINT NOT NULL,
    give_up BIGINT NOT NULL,
    state TEXT NOT NULL,
    tries BIGINT NOT NULL,
    next BIGINT NOT NULL,
    trouble TEXT,
    ended BIGINT
);
CREATE INDEX alert_waiting ON alert_message (receiver) WHERE state = 'waiting';
CREATE INDEX alert_ended ON alert_message (ended) WHERE ended IS NOT NULL;

-- What is to be told to whom, written with the decision it tells of. Without a message it waits for the next one.
CREATE TABLE alert_note (
    id {serial},
    receiver TEXT NOT NULL,
    message {ref} REFERENCES alert_message (id),
    body TEXT NOT NULL
);
CREATE INDEX alert_pending ON alert_note (receiver, id) WHERE message IS NULL;
CREATE INDEX alert_told ON alert_note (message) WHERE message IS NOT NULL;

-- Troubles of the service that people were told of and that are not over.
CREATE TABLE alert_condition (name TEXT NOT NULL PRIMARY KEY, since BIGINT NOT NULL) {compact};

-- Cases that somebody has seen, or does not want to hear of for a while.
CREATE TABLE mute (case_id BIGINT NOT NULL PRIMARY KEY, body TEXT NOT NULL) {compact};
