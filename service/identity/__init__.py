"""Authentication and authorization: keys, sessions, tenants, tokens of runs, rate limits, the audit log."""
