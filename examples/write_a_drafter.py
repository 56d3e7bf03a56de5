"""A drafter of your own in thirty lines: after each token, it drafts what followed that token the last time.

Whatever a drafter proposes, the text stays the target's. A bad one costs time only.

python examples/write_a_drafter.py [MODEL]
"""

import sys
from dataclasses import dataclass

import outrider
from outrider.core.protocols import Drafter, Drafting
from outrider.core.tree import from_paths


@dataclass(frozen=True)
class Successor(Drafter):  # `taps`, which hidden states of the target it reads, stays (): none
    def open(self, prompts, capacity):
        return SuccessorDrafting([list(prompt) for prompt in prompts])


@dataclass
class SuccessorDrafting(Drafting):
    texts: list

    def observe(self, round):  # called after every round: the tokens that it added
        for text, tokens in zip(self.texts, round.tokens):
            text.extend(tokens)

    def propose(self, rows, budget):  # a tree below each text's last token
        return from_paths(
            rows.root,
            [
                [guess(text, min(budget.depth, remaining - 1))] if remaining > 1 and budget.depth else []
                for text, remaining in zip(self.texts, rows.remaining)
            ],
            max(1, budget.nodes),
        )[0]

    def select(self, index):  # row i becomes old row index[i]
        self.texts = [list(self.texts[i]) for i in index]

    def join(self, other):  # new rows come in
        self.texts += other.texts


def guess(text, length):
    after, path = dict(zip(text, text[1:])), [text[-1]]
    while len(path) <= length and path[-1] in after:
        path.append(after[path[-1]])
    return path[1:]


model = sys.argv[1] if len(sys.argv) > 1 else "demo"
# The automatic budget goes by the clock. A fixed one gives the same number of rounds on every machine.
drafted = outrider.load(model, Successor()).generate("one two one two one", max_new_tokens=64, budget="8x7")[0]
plain = outrider.load(model, "none").generate("one two one two one", max_new_tokens=64)[0]
assert drafted.tokens == plain.tokens
print(drafted.text)
print(f"{plain.usage.rounds} rounds without the drafter, {drafted.usage.rounds} with it")
