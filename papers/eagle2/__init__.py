"""eagle2: claims, published facts, runs, judges and verdicts."""
