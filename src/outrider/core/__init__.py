"""Trees, their growth, noise, sampling, verification and ends of text: pure functions of arrays."""
