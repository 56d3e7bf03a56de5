"""Evidence of losslessness: the audit, exact distributions of the rules, and parity with vLLM."""
