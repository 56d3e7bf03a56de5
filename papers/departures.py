"""Where our runs depart from the papers': letters that stand beside a row's verdict, and what they mean."""

from __future__ import annotations

DEPARTURES = {
    "a": "T = 1 here is T = 0 alone: the stored speeds at T = 1 are of `coupled`, which no paper has",
    "b": "8,192 of SmolLM2's 49,152 tokens can be drafted",
    "c": "Medusa's heads share one matrix of 8,192 tokens, where the paper has a head each",
    "d": "HASS's chains stand for a draft model's",
    "e": "HASS's trees stand for Medusa's",
    "f": "acceptance at a depth is that of the rounds that came so far",
    "g": "the Mamba learnt from nothing on the target's answers; the paper tunes a pretrained one",
    "h": "dynamic trees of 16 nodes, not chains",
    "i": "made by an earlier version of the program, whose run did not store its time and machine",
    "j": "a budget of half a million tokens for each training",
    "k": "the weight of the tokens' loss is 0.5 (paper: 0.1)",
    "l": "HASS with two passes and without its top-K term",
    "m": "tau stands for speed",
    "n": "the states' bytes, not the peak of the process",
    "o": "methods with unequal nodes: EAGLE's static tree 26, the others 16",
    "p": "few prompts, and not the dense target's",
    "q": "T5 of 0.5 and 2 million parameters, trained here",
    "r": "one bandit for all requests, with the exact reward",
    "s": "texts and code in place of LongBench",
    "t": "trees of 16 nodes in place of chains of five",
    "u": "compiled passes stand for gpt-fast, four or eight bits of ours for int4; HASS for EAGLE",
}
