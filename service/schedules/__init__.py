"""Schedules that fire jobs: cron expressions, firings, the background task."""
