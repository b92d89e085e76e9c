-- Failed user jobs by node, as the cluster reports them. `work` is the cluster's id of the job: a repeated report is
-- one row.
CREATE TABLE failed_work (
    work TEXT NOT NULL,
    node {ref} NOT NULL REFERENCES node (id),
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    at BIGINT NOT NULL,
    how TEXT NOT NULL,
    PRIMARY KEY (work, node)
) {compact};
CREATE INDEX failed_work_at ON failed_work (at);
