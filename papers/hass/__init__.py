"""hass: claims, published facts, runs, judges and verdicts."""
