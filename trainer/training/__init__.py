"""One rank's training: a job's words become objects (``build``), and the loop steps, checkpoints and evaluates."""
