"""Jobs from submission to their final state: records, admission, the runner, run events, executors."""
