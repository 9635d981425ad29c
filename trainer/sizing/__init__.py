"""Prediction of what a run will need of memory, time and GPUs. Without torch: the service imports it."""
