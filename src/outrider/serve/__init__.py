"""An OpenAI-compatible server: one thread decodes for all, asyncio speaks HTTP."""
