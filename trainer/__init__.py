"""One run, from a JobSpec to published item vectors."""
