-- The last cluster state the leader observed, compressed; plain JSON where an older program wrote it.
CREATE TABLE picture (id {number} NOT NULL PRIMARY KEY, at BIGINT NOT NULL, body {blob} NOT NULL);
{only-postgres} ALTER TABLE picture ALTER COLUMN body SET STORAGE EXTERNAL;
{only-postgres} INSERT INTO picture SELECT 1, CAST(a.value AS BIGINT), convert_to(b.value, 'UTF8') FROM meta a, meta b WHERE a.key = 'cluster-at' AND b.key = 'cluster';
{only-sqlite} INSERT INTO picture SELECT 1, CAST(a.value AS BIGINT), CAST(b.value AS BLOB) FROM meta a, meta b WHERE a.key = 'cluster-at' AND b.key = 'cluster';
DELETE FROM meta WHERE key IN ('cluster-at', 'cluster');
