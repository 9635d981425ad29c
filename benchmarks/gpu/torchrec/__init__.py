"""Our tables under TorchRec's DistributedModelParallel and its pipeline on one GPU, compared with TorchRec's."""
