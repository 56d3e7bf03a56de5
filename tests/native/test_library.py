"""Which library is taken, and that texts do not depend on who compiled it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import outrider
from outrider.backends import choose
from outrider.backends.native import library as native
from outrider.backends.native import variants
from outrider.backends.native.variants import AVX2, AVX512, NEON, PLATFORMS, PRECISIONS, TILES

HALF = "bfloat16", "bfloat16"
with_both = pytest.mark.skipif(
    variants.zig() is None or shutil.which("gcc") is None or not native.suits(),
    reason="needs gcc, the package ziglang, and a processor that the code is written for",
)


@pytest.mark.parametrize(
    ("platform", "abilities", "name"),
    [
        ("Linux-x86_64", AVX2, "avx2"),
        ("Linux-x86_64", AVX2 | {"avx_vnni"}, "avxvnni"),
        ("Linux-x86_64", AVX2 | {"avx512f", "avx512_vnni"}, "avx2"),
        ("Linux-x86_64", AVX512, "avx512"),
        ("Linux-x86_64", AVX512 | {"avx_vnni"}, "avx512"),
        ("Linux-x86_64", TILES | {"avx_vnni"}, "amx"),
        ("Linux-x86_64", AVX2 - {"f16c"}, None),
        ("Linux-aarch64", NEON, "neon"),
        ("Linux-aarch64", NEON | {"asimddp", "i8mm", "bf16"}, "i8mm"),
        ("Linux-aarch64", NEON | {"asimddp", "bf16"}, "dotprod"),
        ("Linux-aarch64", NEON | {"i8mm"}, "neon"),
        ("Darwin-arm64", NEON | {"asimddp", "i8mm"}, "i8mm"),
        ("Darwin-arm64", NEON | {"asimddp"}, "dotprod"),
        ("Darwin-x86_64", TILES, "avx2"),
        ("Windows-AMD64", AVX2, "avx2"),
        ("Windows-AMD64", frozenset(), None),
    ],
)
def test_the_best_library_that_a_processor_can_run_is_taken(
    platform: str, abilities: frozenset[str], name: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind = PLATFORMS[platform]
    monkeypatch.setattr(native, "PREBUILT", tmp_path)
    monkeypatch.setattr(native, "abilities", lambda: abilities)
    monkeypatch.setattr(variants, "this", lambda: kind)
    assert native.prebuilt(*HALF) is None, "a clone has none"
    for variant in kind.variants:
        for precision in variant.precisions:
            (tmp_path / variants.file_name(variant, *precision, kind.suffix)).touch()
    assert native.suits() is (name is not None)
    result = native.prebuilt(*HALF)
    assert (result and result.name.split("-")[0]) == name
    assert name is None or all(native.prebuilt(*precision) for precision in PRECISIONS)


def test_machines_that_the_code_is_not_written_for_have_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "this", lambda: None)
    native.library.cache_clear()
    assert native.library(*HALF) is None
    native.library.cache_clear()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not where the wheel's library is there, nor on a processor that no compiler would help."""
    monkeypatch.setattr(native, "PREBUILT", tmp_path)
    monkeypatch.setattr(variants, "this", lambda: PLATFORMS["Linux-x86_64"])
    monkeypatch.setattr(native, "abilities", lambda: AVX2)
    monkeypatch.setenv("CC", "no-such-compiler")
    native.library.cache_clear()
    find = choose.find_spec
    monkeypatch.setattr(choose, "find_spec", lambda name: None if name == "torch" else find(name))
    with pytest.raises(
        outrider.InputError, match=r"^demo needs a C compiler \(gcc or clang\) or torch here: pip install"
    ):
        choose.load("demo")
    monkeypatch.setattr(native, "abilities", lambda: frozenset())
    with pytest.raises(outrider.InputError, match=r"^demo needs torch here: pip install"):
        choose.load("demo")
    monkeypatch.setattr(native, "abilities", lambda: AVX2)
    (tmp_path / variants.file_name(PLATFORMS["Linux-x86_64"].variants[-1], "float32", "float32")).touch()
    assert not native.lacks_compiler()
    native.library.cache_clear()


def test_the_compilers_of_a_machine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """$CC may have options; where it names nothing, no other is taken behind the user's back."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in ("gcc", "clang", "ccache") else None)
    monkeypatch.setattr(variants, "zig", lambda: ["zig", "cc"])
    monkeypatch.delenv("CC", raising=False)
    assert [*native._compilers()] == [["/bin/gcc"], ["/bin/clang"], ["zig", "cc"]]
    monkeypatch.setenv("CC", "ccache gcc -m64")
    assert [*native._compilers()] == [["/bin/ccache", "gcc", "-m64"]]
    monkeypatch.setenv("CC", "icc")
    assert [*native._compilers()] == []
    assert "there is no icc, which $CC names" in caplog.text


@with_both
def test_the_next_compiler_is_tried_where_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where gcc is too old."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "PREBUILT", tmp_path)
    gcc = shutil.which("gcc")
    monkeypatch.setattr(native, "_compilers", lambda: iter([["/bin/false"], [str(gcc)]]))
    native.library.cache_clear()
    try:
        assert native.library(*HALF) is not None
    finally:
        native.library.cache_clear()


def test_a_library_of_other_sources_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a clone where the sources have changed since."""
    kind = PLATFORMS["Linux-x86_64"]
    monkeypatch.setattr(native, "PREBUILT", tmp_path)
    monkeypatch.setattr(native, "abilities", lambda: AVX2)
    monkeypatch.setattr(variants, "this", lambda: kind)
    (tmp_path / variants.file_name(kind.variants[-1], *HALF)).touch()
    assert native.prebuilt(*HALF) is not None
    shutil.copytree(variants.SOURCES, tmp_path / "c")
    (tmp_path / "c" / "noise.h").write_text("/* changed */\n", encoding="utf-8")
    monkeypatch.setattr(variants, "SOURCES", tmp_path / "c")
    assert native.prebuilt(*HALF) is None


def texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], str]:
    """Tokens of the demo in two precisions, greedy and sampled, plain and with drafts; and the library's name."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    native.library.cache_clear()
    made = []
    for dtype in ("float32", "bfloat16"):
        for drafter in ("none", "demo/hass"):
            llm = outrider.load("demo", drafter, dtype=dtype)
            assert llm.target.exact == "bits"
            for temperature in (0.0, 1.0):
                prompts = ["Once upon a time", "The old bridge was built of stone. " * 6]
                outputs = llm.generate(prompts, max_new_tokens=48, temperature=temperature, seed=5)
                made += [output.tokens for output in outputs]
    code = native.library(*HALF)
    native.library.cache_clear()
    return made, native.NAMES[code]


@with_both
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.trained
def test_texts_are_those_of_gcc_with_zigs_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel's, and the one that zig makes here where there is no gcc."""
    by_gcc, _ = texts(tmp_path / "gcc", monkeypatch)
    with monkeypatch.context() as wheel:
        wheel.setattr(native, "PREBUILT", tmp_path / "lib")
        kind = variants.this()
        assert kind is not None
        fit = next(variant for variant in kind.variants if variant.needs <= native.abilities())
        variants.build(tmp_path / "lib", kind, kind.variants[kind.variants.index(fit) :])
        result, name = texts(tmp_path / "none", wheel)
        assert name.startswith(f"{fit.name}-bfloat16-bfloat16-")
        assert result == by_gcc
    with monkeypatch.context() as alone:
        alone.setattr(shutil, "which", lambda name: None)
        assert next(native._compilers()) == variants.zig()
        result, _ = texts(tmp_path / "zig", alone)
        assert result == by_gcc
