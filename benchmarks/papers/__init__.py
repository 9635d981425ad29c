"""The papers' tables as grids of ordinary jobs, run, resumed, and reported beside the published figures."""
