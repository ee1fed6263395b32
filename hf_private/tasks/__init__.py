"""Tasks: model heads, per-record losses, checks that records stay independent, micro-batches, made-up data."""
