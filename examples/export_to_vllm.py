"""Write a drafter as vLLM loads it, and check the folder the way vLLM's loader does not.

python examples/export_to_vllm.py TARGET DRAFTER_FOLDER OUT
"""

import json
import sys

from outrider.checkpoints import read
from outrider.checkpoints.check import check
from outrider.checkpoints.target import Facts
from outrider.checkpoints.write import write

target, drafter, out = sys.argv[1:4]
facts = Facts.at(target)
write(read(drafter, facts), "vllm", facts, out)
faults = check(out, "vllm", facts)
assert not faults, faults
how = {"method": "eagle", "model": out, "num_speculative_tokens": 3}
print(f"vllm serve {target} --speculative-config '{json.dumps(how)}'")
