"""Operations: metrics, doctor, retention, backups, worker processes."""
