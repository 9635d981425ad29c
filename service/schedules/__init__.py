"""When jobs are fired by themselves: cron, firings, the background task."""
