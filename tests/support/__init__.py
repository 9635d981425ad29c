"""What tests of several rooms share: processes, servers and clusters to start, models, runs and cases to take."""
