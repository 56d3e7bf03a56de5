"""What stands beside a row's verdict: letters for departures from its paper, digits for why something was not run."""

from __future__ import annotations

DEPARTURES = {
    "a": "speeds at T = 1 are stored under `coupled` alone, which no paper has",
    "b": "8,192 of SmolLM2's 49,152 tokens can be drafted (Hydra: 4,096)",
    "c": "Medusa's heads share one matrix of 8,192 tokens, where the paper has a head each",
    "e": "HASS's trees stand for Medusa's",
    "f": "acceptance at a depth is that of the rounds that came so far",
    "g": "the Mamba learnt from nothing on the target's answers; the paper tunes a pretrained one",
    "h": "dynamic trees of 16 nodes, not chains",
    "i": "a run that it reads did not store its processor's name",
    "j": "a budget of half a million tokens for each training",
    "k": "the weight of the tokens' loss is 0.5 (paper: 0.1)",
    "l": "HASS without its top-K term",
    "m": "tau stands for speed",
    "n": "the states' bytes, not the peak of the process",
    "o": "methods with unequal nodes: EAGLE's static tree 26, the others 16",
    "p": "few prompts, and not the dense target's",
    "q": "T5 of 0.5 and 2 million parameters, trained here",
    "s": "texts and code in place of LongBench",
    "w": "EAGLE, Hydra, the draft models and the Mambas learnt two million tokens of the target's answers",
    "u": "compiled passes stand for gpt-fast, four or eight bits of ours for int4; HASS for EAGLE",
    "x": "the target's likelihood stands for a judge's score",
}
WHY = {
    "3": "the paper's own study has not been run, or not whole",
    "5": "speeds under `rejection` take a quiet machine",
    "6": "it takes GPUs",
    "8": "Medusa-2 was trained on the demo's target alone",
    "7": "it takes a mixture of experts of this size, and a training",
}
CAUSES: tuple[tuple[str, str], ...] = (  # (rows with a statement that fails, why)
    (
        "L-38, M-ladder, M-sizes, M-treesize, E-F1, E-F2, E-T5, E-F9, E-T7, Ma-T4, Ma-T5",
        "speeds: on two cores of a Zen 4 a pass's time grows with its nodes (plain 4.5 ms; 8 nodes 11, 16 17, 26 26, "
        "60 54), where a GPU waits for its memory. So what has fewer nodes is faster, and two tokens a round do not "
        "pay for 26 nodes. A millisecond of each round, and at T = 1 another 7 to 12 of a sampled tree's, are our own "
        "code under `rejection` (since cut). In batches plain decoding already fills the cores. (On two Intel cores "
        "with tiles 16 nodes take 1.5 plain passes, and EAGLE gains)",
    ),
    (
        "E-T5, E-F9",
        "the tree multiplies tokens a round by 1.26, the paper's by 1.22: the gain is smaller because the chain's 1.55 "
        "are half of the paper's. The drafter learnt two million tokens, and the target has 135 million parameters",
    ),
    (
        "E2-T1",
        "tokens a round at 26 nodes each, where the paper has speeds and more nodes for EAGLE-2. At T = 1 the dynamic "
        "tree's likeliest tokens are point masses for `rejection`, which accepts fewer of them than of the tokens that "
        "EAGLE's static tree samples; under `coupled` they are ranked by the target's noise, and it has 7 % more. The "
        "draft model (SpS) learnt two million tokens of answers, and guesses less than prompt lookup copies; Lookahead "
        "adds n-grams of its own to what is copied",
    ),
    (
        "E2-F5",
        "at T = 1 the second child of the root alone: it is accepted in a tenth of the rounds of every prompt, and "
        "57 rounds a prompt show a spread of this size one time in five by chance",
    ),
    (
        "E2-T3",
        "of 16 nodes a tree without re-ranking keeps three for each of five layers, likely or not, which costs 7 %; "
        "with it, nodes are kept by value in either case, and what is fed by confidence alone is nearly as good. Of 61 "
        "nodes re-ranking is worth 4 % and value 2 %",
    ),
    (
        "Ma-T1a",
        "a round of either drafts for 2.3 ms at T = 0, for 3.4 and 3.6 at T = 1, and verifies for about 9: drafting "
        "is a quarter of a round or less",
    ),
    (
        "Ma-F1",
        "the Mamba reads the prompt in its first round, which counts as drafting, and 25 rounds share that time; its "
        "state is constant, as in the paper",
    ),
)
