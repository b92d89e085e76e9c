//! Small tables: facts in, views out.
