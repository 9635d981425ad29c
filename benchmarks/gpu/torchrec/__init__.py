"""Our tables under TorchRec's DistributedModelParallel and its pipeline on one GPU, beside TorchRec's own."""
