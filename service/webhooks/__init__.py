"""Webhooks: addresses that are notified of events, and deliveries to them that cannot reach the internal network."""
