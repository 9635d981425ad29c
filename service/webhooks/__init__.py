"""Webhooks: who is told of events, and how deliveries are made without reaching into the internal network."""
