-- Who may speak to the API. Only what a token comes down to is kept: it cannot be used to speak.
CREATE TABLE token (
    name TEXT NOT NULL PRIMARY KEY,
    role TEXT NOT NULL,
    digest TEXT NOT NULL,
    actor TEXT NOT NULL,
    created BIGINT NOT NULL,
    expires BIGINT,
    revoked BIGINT
) {compact};
-- From where something was asked for, and what was shown of it before it was done.
ALTER TABLE audit ADD COLUMN origin TEXT;
ALTER TABLE audit ADD COLUMN plan TEXT;
