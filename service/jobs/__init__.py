"""Jobs from submission to their final state: database records, admission, the runner, run events, executors."""
