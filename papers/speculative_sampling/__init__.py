"""speculative_sampling: claims, published facts, runs, judges and verdicts."""
