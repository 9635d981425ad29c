"""Our CTR models compared with DeepCTR-Torch's and TorchRec's: ``python -m benchmarks.ctr_peers``."""
