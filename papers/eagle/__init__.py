"""eagle: claims, published facts, runs, judges and verdicts."""
