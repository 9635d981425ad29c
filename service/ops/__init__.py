"""For who runs the service: metrics, doctor, retention, backups, worker processes."""
