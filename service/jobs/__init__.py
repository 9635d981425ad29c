"""Jobs from submission to their final state: records, admission, the runner, what runs report, executors."""
