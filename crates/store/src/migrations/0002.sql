-- The last output of jobs that ended without a complete result: the end of what each printed, and how the cluster says it
-- ended. Without secrets and control characters, a few KiB per node. Deleted with its run.
CREATE TABLE job_output (
    run BIGINT NOT NULL REFERENCES run (id),
    node {ref} NOT NULL REFERENCES node (id),
    at BIGINT NOT NULL,
    ending TEXT,
    text TEXT NOT NULL,
    PRIMARY KEY (run, node)
);
CREATE INDEX job_output_by_node ON job_output (node, run);
