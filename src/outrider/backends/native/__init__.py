"""Our own passes on CPUs, from a file to its logits, without torch."""
