"""Hidden states of other engines' layouts: read as the target's own features, or refused in a sentence."""

from __future__ import annotations

import fcntl
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small import build

from outrider.backends.torch import HFTarget
from outrider.params import InputError
from outrider.training import data, hidden_states
from outrider.training.data import Batch, Document, pack
from outrider.training.features import see
from outrider.training.foreign import ForeignFeatures
from outrider.training.loop import train
from outrider.training.recipe import Recipe

LAYERS, LAST = (1, 2), 3  # what a drafter reads, and the number of layers
TAPS = (1, 2, -1)


def texts(count: int = 6) -> list[list[int]]:
    g = torch.Generator().manual_seed(3)
    sizes = torch.randint(9, 30, (count,), generator=g).tolist()
    return [torch.randint(1, 90, (n,), generator=g).tolist() for n in sizes]


def batch(given: Sequence[list[int]], length: int = 48) -> Batch:
    return pack([Document(tuple(t), (True,) * len(t), str(i)) for i, t in enumerate(given)], length)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget(build("llama", torch.float32))


def states(target: HFTarget, tokens: list[int]) -> dict[str, torch.Tensor]:
    """A text's hidden states by the stock forward: those that enter layers 1 and 2, and the last before and after the
    norm."""
    model: Any = target.model
    seen: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda module, given, out: seen.append(given[0][0]))
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    hook.remove()
    return {**{str(k): out.hidden_states[k][0] for k in LAYERS}, "raw": seen[0], "normed": out.hidden_states[-1][0]}


def header(folder: Path, layers: Sequence[int] = (*LAYERS, LAST), normed: bool = False, **target: int) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": LAST, "vocab_size": 97, **target}
    fields = {"target": sizes, "layers": list(layers), "normed": normed}
    (folder / "features.json").write_text(json.dumps(fields))


def vllm(folder: Path, target: HFTarget, given: Sequence[list[int]], fp8: bool = False, flat: bool = False) -> None:
    """hs_N.safetensors: [t, layers, h], the last before the norm; in fp8 with a scale for each token."""
    folder.mkdir(exist_ok=True)
    for i, tokens in enumerate(given):
        result = states(target, tokens)
        stacked = torch.stack([result["1"], result["2"], result["raw"]], 1)
        made = {"hidden_states": stacked.bfloat16(), "token_ids": torch.tensor(tokens)}
        if fp8:
            scales = stacked.abs().amax((1, 2), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            made["hidden_states"] = (stacked / scales).to(torch.float8_e4m3fn)
            made["hidden_states_scales"] = scales.flatten(1) if flat else scales
        save_file(made, folder / f"hs_{i}.safetensors")
    header(folder)


def specforge(folder: Path, target: HFTarget, given: Sequence[list[int]], packed: bool = False) -> None:
    """rows_0-5000/data_N.ckpt: the drafter's layers side by side, and the last after the norm."""
    (folder / "rows_0-5000").mkdir(parents=True, exist_ok=True)
    for i, tokens in enumerate(given):
        result = states(target, tokens)
        made = {
            "input_ids": torch.tensor(tokens),
            "loss_mask": torch.tensor([0, 0] + [1] * (len(tokens) - 2)),
            "aux_hidden_state": torch.cat([result["1"], result["2"]], -1)[None],
            "hidden_state": result["normed"][None],
        }
        path = folder / "rows_0-5000" / f"data_{i}.ckpt"
        if packed:
            with gzip.open(f"{path}.gz", "wb") as file:
                torch.save(made, file)
        else:
            torch.save(made, path)
    header(folder, normed=True)


LAYOUTS = {
    "vllm": (lambda *given: vllm(*given), 0.01),
    "fp8": (lambda *given: vllm(*given, fp8=True), 0.04),
    "fp8 with flat scales": (lambda *given: vllm(*given, fp8=True, flat=True), 0.04),
    "specforge": (lambda *given: specforge(*given), 1e-5),
    "specforge packed": (lambda *given: specforge(*given, packed=True), 1e-5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_are_the_targets(layout: str, target: HFTarget, tmp_path: Path) -> None:
    """Of every text in a packed row, by every tap; texts without a file are read by the target."""
    write, tolerance = LAYOUTS[layout]
    given = texts()
    write(tmp_path, target, given[:4])
    said: list[str] = []
    known, rows = batch(given[:4]), batch(given)
    assert int(known.documents.max()) > 0, "texts share rows"
    features = ForeignFeatures(tmp_path, target, rows, TAPS, said.append)
    assert said == [f"features in {tmp_path}: 4 of 6 texts; the target computes the others"]
    true, result = see(target, known, TAPS), features.see(target, known, False)
    at = known.documents >= 0
    for tap in TAPS:
        a, b = result.features[tap][at], true.features[tap][at]
        assert (a - b).norm() / b.norm() < tolerance
        assert (result.features[tap][~at] == 0).all()
    other = batch(given[4:])
    for tap in TAPS:
        assert torch.equal(features.see(target, other, False).features[tap], see(target, other, TAPS).features[tap])


def test_a_training_reads_them(target: HFTarget, tmp_path: Path) -> None:
    """The losses of a training with exact features are those of one without, and it does not run the target."""
    given = texts(12)
    specforge(tmp_path / "features", target, given)
    documents = list(data.read([tmp_path / "features"], None))
    assert [list(d.tokens) for d in documents] == [*given[:2], *given[10:], *given[2:10]], "in the order of the names"
    assert documents[0].learn == (False, False, *(True,) * (len(given[0]) - 2))
    recipe = Recipe("medusa", steps=3, rows=2, length=32, lr=1e-3, prompts=1, tokens=4)
    plain = train(target, documents, tmp_path / "plain", recipe, quiet=True)
    more = Recipe(**{**recipe.__dict__, "features": str(tmp_path / "features")})
    read = train(target, documents, tmp_path / "read", more, quiet=True)
    assert read.loss == pytest.approx(plain.loss, abs=1e-5)
    with pytest.raises(InputError, match="give --features or --cache"):
        Recipe("medusa", features="a", cache="b").complete()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": (0, 2, LAST)}, "has layer 1 where features.json says layer 0"),
        ({"layers": (1, 2)}, "the drafter also reads 3"),
        ({"layers": (0, 1, 2, LAST)}, "has 3 layers, and features.json names 4"),
        ({"normed": True}, "has layer 3 before the final norm where features.json says layer 3 after the final norm"),
        ({"hidden_size": 64}, "is of a target with hidden_size 64, and this one has 32"),
        ({"num_hidden_layers": 4}, "num_hidden_layers 4, and this one has 3"),
        ({"layers": (2, 1, LAST)}, "ascending"),
    ],
)
def test_a_header_that_does_not_fit(fields: dict[str, Any], words: str, target: HFTarget, tmp_path: Path) -> None:
    given = texts()
    vllm(tmp_path, target, given)
    header(tmp_path, **fields)
    taps = tuple(k for k in (fields.get("layers") or LAYERS) if k < LAST)[:1]
    with pytest.raises(InputError, match=words):
        ForeignFeatures(tmp_path, target, batch(given), (*taps, -1), print)


def test_files_that_do_not_fit(target: HFTarget, tmp_path: Path) -> None:
    given = texts()
    vllm(tmp_path, target, given)
    with pytest.raises(InputError, match="the data has none of these"):
        ForeignFeatures(tmp_path, target, batch([t[::-1] for t in given]), TAPS, print)
    with pytest.raises(InputError, match="more than a row; raise --length"):
        ForeignFeatures(tmp_path, target, batch(given, 16), TAPS, print)
    with pytest.raises(InputError, match="is not of this target"):
        ForeignFeatures(tmp_path, other(), batch(given), TAPS, print)
    with pytest.raises(InputError, match="has no loss mask"):
        list(data.read([tmp_path], None))
    (tmp_path / "features.json").unlink()
    with pytest.raises(InputError, match=r"has no features\.json"):
        ForeignFeatures(tmp_path, target, batch(given), TAPS, print)


def other() -> HFTarget:
    """A target of the same sizes with other weights."""
    made, g = build("llama", torch.float32), torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.2 if p.dim() > 1 else p)
    return HFTarget(made)


class Code:
    """What a pickle could do."""

    def __reduce__(self) -> Any:
        return print, ("run",)


def test_a_file_that_cannot_be_read(target: HFTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = texts(1)
    vllm(tmp_path, target, given)
    path = tmp_path / "hs_0.safetensors"
    lock = tmp_path / "hs_0.safetensors.lock"
    lock.touch()
    assert hidden_states.load(path, 32).tokens == given[0], "a lock that nobody holds"
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="is still being written"):
            hidden_states.load(path, 32)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="no readable token_ids"):
        hidden_states.load(path, 32)
    torch.save({"input_ids": Code()}, tmp_path / "data_0.ckpt")
    with pytest.raises(InputError, match="it holds more than tensors"):
        hidden_states.load(tmp_path / "data_0.ckpt", 32)
    assert capsys.readouterr().out == "", "no code was run"
    torch.save({"input_ids": torch.tensor([1])}, tmp_path / "data_0.ckpt")
    with pytest.raises(InputError, match="has no input_ids, loss_mask and hidden_state"):
        hidden_states.load(tmp_path / "data_0.ckpt", 32)
    save_file(
        {"token_ids": torch.tensor([1]), "hidden_states": torch.full((1, 3, 32), torch.nan)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(InputError, match="NaN or infinities"):
        hidden_states.load(tmp_path / "a.safetensors", 32)
