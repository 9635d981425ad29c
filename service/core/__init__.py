"""Foundations of the service: settings, database, errors, logs, threads. Imports no other package of the service."""
