-- Outgoing notifications, one receiver each. `next` is the time of the next attempt; during an attempt, the end of the
-- claim on it.
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

-- Notes by receiver, written with the decision they report. A note without a message waits for the next one.
CREATE TABLE alert_note (
    id {serial},
    receiver TEXT NOT NULL,
    message {ref} REFERENCES alert_message (id),
    body TEXT NOT NULL
);
CREATE INDEX alert_pending ON alert_note (receiver, id) WHERE message IS NULL;
CREATE INDEX alert_told ON alert_note (message) WHERE message IS NOT NULL;

-- Active conditions of the service that were notified.
CREATE TABLE alert_condition (name TEXT NOT NULL PRIMARY KEY, since BIGINT NOT NULL) {compact};

-- Cases that an operator has acknowledged or snoozed.
CREATE TABLE mute (case_id BIGINT NOT NULL PRIMARY KEY, body TEXT NOT NULL) {compact};
