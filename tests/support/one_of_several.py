"""One of several processes that train together (see test_distributed.py): OUT, and whether to shard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from objective_world import target
from torch.distributed.tensor import DTensor
from training_world import RECIPE, documents

from outrider.training import loop
from outrider.training.loop import _State


def main(out: str, shard: bool) -> None:
    torch.set_num_threads(1)
    losses, kinds = [], set()
    step = _State.step

    def watched(self: _State, *given: object) -> tuple[float, int, dict[str, float]]:
        made = step(self, *given)  # type: ignore[arg-type]
        losses.append(made[0])
        kinds.update(isinstance(p, DTensor) for p in self.objective.parameters())
        return made

    _State.step = watched  # type: ignore[method-assign]
    loop.train(target(torch.float32), documents(), out, RECIPE, stop=4, shard=shard, quiet=True)  # interrupted
    result = loop.train(target(torch.float32), documents(), out, RECIPE, shard=shard, quiet=True)
    rank = torch.distributed.get_rank()
    found = {"losses": losses, "sharded": sorted(kinds), "best": result.best}
    Path(f"{out}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "shard")
