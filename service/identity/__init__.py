"""Who sends a request and what they may do: keys, sessions, tenants, tokens of runs, rate limits, the audit log."""
