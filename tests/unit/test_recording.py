"""The picture of a terminal holds what stays on the screen: what a spinner rewrote is gone."""

from __future__ import annotations

from tools.recording import picture, settled


def test_a_rewritten_line_is_gone() -> None:
    spinner = "\x1b[?25lloading 1\rloading 2\r\x1b[2K"
    raw = spinner + "text \x1b[36mdrafted\x1b[0m plain\r\nstep 1\r\n\x1b[1A\x1b[2Kstep 2\r\nend"
    assert settled(raw) == ["text \x1b[36mdrafted\x1b[0m plain", "step 2", "end"]


def test_the_picture_shows_the_command_and_fetches_nothing() -> None:
    svg = picture(["outrider", "generate", "Once upon"], ["the \x1b[36mfox\x1b[0m", ""])
    assert "fox" in svg
    assert "generate" in svg
    assert "url(http" not in svg
    assert "https://cdn" not in svg
