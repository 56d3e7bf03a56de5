"""Evidence of losslessness: the audit, exact laws of the rules, and parity with vLLM."""
