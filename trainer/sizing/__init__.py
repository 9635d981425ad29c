"""Prediction of the memory, time and GPUs that a run needs. Without torch: the service imports it."""
