"""What a run will need of memory, time and GPUs, before anything is made. Without torch: the service imports it."""
