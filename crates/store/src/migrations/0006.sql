-- API tokens. Only the digest is stored; it cannot be used to sign in.
CREATE TABLE token (
    name TEXT NOT NULL PRIMARY KEY,
    role TEXT NOT NULL,
    digest TEXT NOT NULL,
    actor TEXT NOT NULL,
    created BIGINT NOT NULL,
    expires BIGINT,
    revoked BIGINT
) {compact};
-- Origin of a request, and the plan shown before it was carried out.
ALTER TABLE audit ADD COLUMN origin TEXT;
ALTER TABLE audit ADD COLUMN plan TEXT;
