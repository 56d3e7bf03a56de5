"""`outrider COMMAND --help`: paragraphs that fill the terminal's lines, and arguments as the pages spell them."""

from __future__ import annotations

import pytest

from outrider.cli import COMMANDS, load, main


@pytest.mark.parametrize("name", COMMANDS)
def test_paragraphs_have_no_line_ends_of_the_source(name: str) -> None:
    command = load(name)
    for each in (command, *getattr(command, "commands", {}).values()):
        assert each.help
        assert "\n" not in each.help.replace("\n\n", "")


@pytest.mark.parametrize("name", ["validate", "recommend", "train", "import", "export"])
def test_the_model_is_one_optional_argument(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert " [MODEL] " in capsys.readouterr().out.replace("\n", " \n")
