"""From a raw log to a preprocessed folder: a job, its tasks and its output."""
