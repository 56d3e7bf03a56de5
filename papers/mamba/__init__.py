"""mamba: claims, published facts, runs, judges and verdicts."""
