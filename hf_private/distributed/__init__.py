"""Training on several processes: DDP with one sum over the ranks, FSDP2 with shards."""
