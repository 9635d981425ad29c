"""Our CTR models beside DeepCTR-Torch's and TorchRec's: ``python -m benchmarks.ctr_peers``."""
